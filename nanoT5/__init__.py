"""nanoT5: a compact research trainer for T5 span-corruption pretraining."""


class UserError(Exception):
    """A mistake of the user's: one sentence that names the key or file and the remedy, shown without a traceback."""
