"""nanoT5: a compact research trainer for T5 span-corruption pretraining."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake of the user's: one sentence that names the key or file and the remedy, shown without a traceback."""


def script(command_line: Callable[[], None]) -> None:
    """Run a command line, which a mistake of the user's ends with its sentence, Ctrl-C with the usual status."""
    try:
        command_line()
    except UserError as error:
        sys.exit(f"nanoT5: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
