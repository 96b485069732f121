"""Train a SentencePiece model on any source of text, for data.tokenizer of nanoT5.main:

    python scripts/train_tokenizer.py my.model data=text data.path='corpus/*.jsonl'
    python scripts/train_tokenizer.py c4.model data=c4 --vocab-size 32000 --byte-fallback

Of a large corpus it reads a sample: some of the documents of many files, drawn with the seed, and none that is held out
for evaluation. The same command on the same corpus gives the same model.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoT5 import UserError, config, data, script, sources, tokenizer  # noqa: E402

CHARACTERS = 50_000_000  # some 12 M tokens of English, 360 for each of 32,000 pieces; takes about 1.3 GB of memory
FILES = 64  # at least, of a corpus that has as many
READ = 10  # characters read for one in the sample, at most
COMPRESSION = 3  # of English, with gzip, zstd or in Parquet, roughly


def sample(corpus: sources.Corpus, cfg, characters: int) -> Iterator[data.Document]:
    """Training documents of many files and from all over them, with so many characters if there are as many.

    Every stride-th document of a file is read, up to the share of the characters that its size gives it. Should these
    not suffice, those between them follow.
    """
    sizes, total = {}, 0
    for i in np.random.default_rng(cfg.seed).permutation(len(corpus.files)):
        filesystem, path = fsspec.url_to_fs(corpus.files[i])
        packed = path.endswith((*sources.COMPRESSED, ".parquet"))
        sizes[corpus.files[i]] = (filesystem.size(path) or 1) * (COMPRESSION if packed else 1)  # not every server tells
        total += sizes[corpus.files[i]]
        if len(sizes) >= FILES and total >= READ * characters:
            break
    stride = min(READ, max(1, total // characters))
    for number in range(stride):
        shares = {file: math.ceil(characters * size / total) for file, size in sizes.items()}
        for file, share in shares.items():
            alone = replace(corpus, files=[file], equal_files=1.0)
            documents = data.Documents(alone, cfg.data.held_out, cfg.seed, number, stride, on_error=cfg.data.on_error)
            for document in documents.read(epoch=0):
                document = document._replace(text=document.text[:share])
                yield document
                share -= len(document.text)
                characters -= len(document.text)
                if not share:
                    break
        if characters <= 0:
            return


def texts(cfg, budget: int) -> Iterator[str]:
    """The sample of every source, by its weight, with a progress bar and a line on each."""
    parts = data.parts_of(cfg.data)
    weights = [part.get("weight", 1.0) for part in parts]
    for part, weight in zip(parts, weights):
        corpus = data.SOURCES[part.source](part, Path(cfg.data.cache).expanduser())
        print(corpus.headline)
        wanted = max(1, round(budget * weight / sum(weights)))
        characters, documents, faults = 0, 0, []
        with tqdm(total=wanted, unit=" characters", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
            for document in sample(corpus, cfg, wanted):
                bar.update(len(document.text))
                characters += len(document.text)
                documents += document.text != ""
                faults += document.reading.faults
                yield document.text
        print(f"sampled {characters:,} characters in {documents:,} documents")
        if faults:
            print(f"{len(faults):,} of what was read had faults, the first: {faults[0]}")


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUTPUT.model")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of nanoT5.main, such as data=text")
    parser.add_argument("--vocab-size", metavar="N", help="pieces, sentinels not counted (default: data.vocab_size)")
    parser.add_argument("--byte-fallback", action="store_true", help="spell what has no piece by 256 pieces for bytes")
    parser.add_argument(
        "--characters", type=int, default=CHARACTERS, metavar="N", help="of text in the sample (default: %(default)s)"
    )
    arguments = parser.parse_intermixed_args()
    output, overrides = arguments.output, arguments.overrides
    if output.suffix != ".model" or output.is_dir():
        raise UserError(f"{output}: the first argument is the file to write, and has to end in .model")
    if arguments.characters < 1:
        raise UserError(f"--characters={arguments.characters}: it has to be a whole number from 1 up")
    if arguments.vocab_size is not None:
        overrides.append(f"data.vocab_size={arguments.vocab_size}")
    cfg, _ = config.load(overrides)
    config.check(cfg)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output.parent}: {error.strerror}; name a folder that can be written") from None
    if not os.access(output.parent, os.W_OK):
        raise UserError(f"{output.parent} may not be written: name another folder, or change its permissions")
    sentences = tokenizer.cut(texts(cfg, arguments.characters))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SentencePiece would not hear of a Ctrl-C before it is done
    print(f"training {cfg.data.vocab_size:,} pieces on {len(sentences):,} lines, a minute or more", flush=True)
    model = tokenizer.fit(sentences, cfg.data.vocab_size, byte_fallback=arguments.byte_fallback)
    description = tokenizer.from_sentencepiece(model, str(output)).description  # what cannot be used is not written
    sources.write_whole(output, model)
    print(f"{description}: use it with data.tokenizer={output}")


if __name__ == "__main__":
    script(command_line)
