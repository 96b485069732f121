"""What a model would be trained on, as text: python scripts/inspect_data.py [--count N] [key=value ...]

    python scripts/inspect_data.py data=text data.path='corpus/*.jsonl' data.text_column=body

A few documents as they are read, then a few chunks of tokens, as text, with what corruption makes of them: the input,
in which sentinels stand for what is masked, and the target, which has it. A wrong column, tokenizer or length shows.
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402

from nanoT5 import config, data, script  # noqa: E402

SHOWN = 400  # characters of a document


def whole(inputs: np.ndarray, targets: np.ndarray, tokenizer: data.Tokenizer) -> list[int]:
    """The chunk from which a row of inputs and targets was made: its masked spans put back."""
    spans, span = {}, []
    for token in targets[:-1].tolist():  # without eos
        if token in tokenizer.sentinel_ids:
            span = spans[token] = []
        else:
            span.append(token)
    return [t for token in inputs[:-1].tolist() for t in spans.get(token, [token])]


def inspect(overrides: list[str], count: int) -> None:
    cfg, _ = config.load(overrides)
    config.check(cfg)
    text = data.build(cfg)
    for corpus in text.corpora:
        print(f"corpus     {corpus.headline}")
        documents = data.Documents(corpus, cfg.data.held_out, cfg.seed).read(epoch=0)
        for document in itertools.islice(documents, count):
            tokens = len(text.tokenizer.encode([document.text])[0])
            more = "" if len(document.text) <= SHOWN else f" ... and {len(document.text) - SHOWN:,} characters"
            print(f"\ndocument   {len(document.text):,} characters, {tokens:,} tokens")
            print(f"           {document.text[:SHOWN]!r}{more}")
    batch, *_ = next(text.batches())
    for inputs, targets in itertools.islice(zip(batch["input_ids"].numpy(), batch["labels"].numpy()), count):
        chunk = whole(inputs, targets, text.tokenizer)
        print()
        for name, ids in (("chunk", chunk), ("input", inputs.tolist()), ("target", targets.tolist())):
            print(f"{name:<10} {len(ids)} tokens: {text.tokenizer.decode(ids)}")


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of nanoT5.main")
    parser.add_argument("--count", type=int, default=3, metavar="N", help="documents and chunks (3)")
    arguments = parser.parse_intermixed_args()
    inspect(arguments.overrides, arguments.count)


if __name__ == "__main__":
    script(command_line)
