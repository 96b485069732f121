"""Sources of text: files in which each row is a document.

A corpus names its files and reads them: (row number, text, fault) of every n-th row of one. A fault says what was
wrong with a row; where nothing could be saved of it, its text is empty. What is here knows nothing of tokens.
"""

import filecmp
import functools
import gzip
import hashlib
import itertools
import json
import os
import re
import sys
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path, PurePath

import fsspec
import pyarrow
import pyarrow.ipc

from nanoT5 import UserError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Rows = Iterator[tuple[int, str, str | None]]  # row number, text, fault

EMPTY = "empty"  # the one fault that is nobody's mistake


@dataclass(frozen=True)
class Corpus:
    files: list[str]  # paths, or addresses that fsspec opens
    read: Callable[[str, int, int], Rows]  # of a file the rows first, first + step, ...
    digest: str  # tells corpora apart
    headline: str  # printed
    description: dict  # stored with the run
    held_out_files: list[str] | None = None  # of a corpus with a validation split; else documents are held out
    equal_files: float = 1.0  # how many files it would be if all were as large as the largest


# ---------------------------------------------------------------------------------------------------------------------
# Files


def lines(path: str, column: str) -> Iterator[bytes]:
    with fsspec.open(path, "rb") as file:
        opened = COMPRESSED.get(PurePath(path).suffix)
        yield from opened(file) if opened else file


def paragraphs(path: str, column: str) -> Iterator[bytes]:
    """What stands between blank lines."""
    paragraph = []
    for line in itertools.chain(lines(path, column), [b""]):  # the empty last line closes the last paragraph
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield b"".join(paragraph)
            paragraph = []


def whole(path: str, column: str) -> Iterator[bytes]:
    yield b"".join(lines(path, column))


def parquet(path: str, column: str) -> Iterator[object]:
    import pyarrow.parquet

    with fsspec.open(path, "rb") as file:
        table = pyarrow.parquet.ParquetFile(file)
        check_column(path, column, table.schema_arrow.names)
        try:
            for batch in table.iter_batches(columns=[column], batch_size=1024):
                yield from values(batch.column(0))
        except OSError as error:
            if type(error) is OSError and error.errno is None:  # no disk or network, but Arrow about a damaged page
                raise pyarrow.ArrowInvalid(str(error)) from None
            raise


def arrow(path: str, column: str) -> Iterator[object]:
    """A file of a folder that datasets.save_to_disk wrote."""
    with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as table:
        check_column(path, column, table.schema.names)
        for batch in table:
            yield from values(batch.column(column))


def values(column: pyarrow.Array) -> list[object]:
    """Strings as bytes, since they may not be UTF-8."""
    text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    return (column.cast(pyarrow.large_binary()) if text else column).to_pylist()


def check_column(path: str, column: str, there: list[str]) -> None:
    if column not in there:
        raise UserError(f"data.text_column={column} is not in {path}, which has {', '.join(there)}")


def decoded(row: bytes, column: str) -> tuple[str, str | None]:
    try:
        text, fault = row.decode("utf-8-sig"), None
    except UnicodeDecodeError:
        text, fault = row.decode("utf-8-sig", errors="replace"), "invalid UTF-8, replaced"
    return text.replace("\r\n", "\n"), fault


def field(row: bytes, column: str) -> tuple[str, str | None]:
    line, fault = decoded(row, column)
    if not line.strip():
        return "", None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return "", "not JSON"
    text, missing = string(value.get(column) if isinstance(value, dict) else None, column)
    return text, missing or fault


def cell(value: object, column: str) -> tuple[str, str | None]:
    return decoded(value, column) if isinstance(value, bytes) else string(value, column)


def string(value: object, column: str) -> tuple[str, str | None]:
    if not isinstance(value, str):
        return "", f'no string called "{column}"'
    return value.encode(errors="replace").decode(), None  # JSON can spell code points that no text has


FORMATS: dict[
    str, tuple[Callable, Callable, str]
] = {  # by a file's ending: its rows, the text of one, what one is called
    ".txt": (paragraphs, decoded, "paragraph"),
    ".jsonl": (lines, field, "line"),
    ".json": (lines, field, "line"),
    ".parquet": (parquet, cell, "row"),
    ".arrow": (arrow, cell, "row"),
}
COMPRESSED: dict[str, Callable] = {".gz": gzip.open, ".zst": zstd.open}
KNOWN = f"{', '.join(FORMATS)} file, or one of these with {' or '.join(COMPRESSED)}"
# what decompressors and Arrow raise about a file that is cut off or overwritten
DAMAGES = (EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError, pyarrow.ArrowInvalid)


def ending(path: str) -> str:
    name = PurePath(path)
    return PurePath(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def read(path: str, first: int, step: int, column: str, document: str) -> Rows:
    """Every step-th row of a file from `first` on; document: what one is in a .txt file, "paragraph" or "file"."""
    rows_of, text_of, _ = FORMATS[ending(path)]
    if rows_of is paragraphs and document == "file":
        rows_of = whole
    count = itertools.count()
    try:
        for row, raw in itertools.islice(zip(count, rows_of(path, column)), first, None, step):
            text, fault = text_of(raw, column)
            if "\0" in text:
                text, fault = text.replace("\0", ""), "NUL, removed"
            yield row, *((text, fault) if text.strip() else ("", fault or EMPTY))
    except DAMAGES:
        row = next(count) - 1
        if row >= first and (row - first) % step == 0:
            yield row, "", "damaged from here on"
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and "://" not in path:  # a network's errors are of all kinds
            raise
        raise UserError(
            f"{path} cannot be read on from row {next(count)}: {error}; the same command tries again"
        ) from None


# ---------------------------------------------------------------------------------------------------------------------
# Corpora


def text(data, cache: Path) -> Corpus:
    """The files of a path, folder or glob in the order of their names; of files with the same content the first."""
    path = Path(data.path).expanduser()
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.is_file() and ending(file.name) in FORMATS]
    else:
        found = [file for file in ([path] if path.is_file() else map(Path, glob(str(path), recursive=True)))]
        found = [file for file in found if file.is_file()]
    if not found:
        raise UserError(f"data.path={data.path} matches no file: give a {KNOWN}, a folder or a quoted glob of them")
    if odd := [file for file in found if ending(file.name) not in FORMATS]:
        raise UserError(f"data.path: {odd[0]} is not a {KNOWN}")
    if locked := [file for file in found if not os.access(file, os.R_OK)]:
        raise UserError(f"data.path: {locked[0]} may not be read: change its permissions")
    files, alike, repeated = [], defaultdict(list), 0
    for file in sorted(found):
        others = alike[fingerprint(file)]
        if any(filecmp.cmp(file, other, shallow=False) for other in others):
            repeated += 1
        else:
            files.append(file)
            others.append(file)
    sizes = [file.stat().st_size for file in files]
    size = sum(sizes)
    if size == 0:
        raise UserError(f"data.path={data.path} has no text in it")
    headline = f"{data.path}: {len(files)} file{'s' * (len(files) > 1)}, {size / 1e6:.1f} MB"
    headline += f", {repeated} more with the same content left out" * (repeated > 0)
    facts = {"path": data.path, "files": len(files), "bytes": size, "repeated_files": repeated}
    digest = hashlib.sha256(repr([(file.name, fingerprint(file)) for file in files]).encode()).hexdigest()
    return Corpus(list(map(str, files)), reader(data), digest, headline, facts, equal_files=size / max(sizes))


def fingerprint(file: Path, end: int = 2**16) -> str:
    """Of a file's size and of its first and last bytes: enough to notice that it was edited, without reading it all."""
    size = file.stat().st_size
    with file.open("rb") as content:
        first = content.read(end)
        content.seek(max(0, size - end))
        return hashlib.sha256(first + content.read() + str(size).encode()).hexdigest()


def reader(data) -> Callable[[str, int, int], Rows]:
    return functools.partial(read, column=data.text_column, document=data.txt_document)


def saved(data, cache: Path) -> Corpus:
    """A folder written by save_to_disk of a datasets.Dataset, or of a DatasetDict with train and perhaps validation."""
    import datasets

    try:
        found = datasets.load_from_disk(str(Path(data.path).expanduser()))
    except (OSError, ValueError) as error:
        raise UserError(f"data.path={data.path} is not a folder of datasets.save_to_disk: {error}") from None
    splits = found if isinstance(found, dict) else {"train": found}
    if "train" not in splits:
        raise UserError(f"data.path={data.path} has no split called train, but {', '.join(splits)}")
    files = {name: [entry["filename"] for entry in split.cache_files] for name, split in splits.items()}
    facts = {"path": data.path, "files": len(files["train"]), "rows": splits["train"].num_rows}
    digest = hashlib.sha256(repr([fingerprint(Path(file)) for file in files["train"]]).encode()).hexdigest()
    headline = f"{data.path}: {splits['train'].num_rows:,} rows"
    return Corpus(files["train"], reader(data), digest, headline, facts, files.get("validation"), len(files["train"]))


def hub(data, cache: Path) -> Corpus:
    """The files of a data set's train and validation splits on the Hugging Face Hub, read as they are needed.

    Their addresses hold the repository's newest commit; the same data set is one that has the same files, though its
    README may have been edited since.
    """
    import datasets

    try:
        splits = datasets.load_dataset_builder(data.name, data.config).config.data_files or {}
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"data.name={data.name}, data.config={data.config} cannot be had from the Hub: {reason}"
        ) from None
    files = {split: list(map(str, splits.get(split, ()))) for split in ("train", "validation")}
    if not files["train"]:
        raise UserError(f"data.name={data.name} has no split called train")
    if odd := [path for paths in files.values() for path in paths if ending(path) not in FORMATS]:
        raise UserError(f"data.name={data.name}: {odd[0]} is not a {KNOWN}")
    headline = f"{data.name} {data.config or ''} on the Hub: {len(files['train']):,} files of training text"
    facts = {"name": data.name, "config": data.config, "files": len(files["train"]), "first": files["train"][0]}
    entries = [filesystem.info(path) for filesystem, path in map(fsspec.url_to_fs, files["train"])]  # known by now
    sizes = [entry["size"] or 1 for entry in entries]  # not every server tells
    content = [(re.sub("@[^/]*", "", entry["name"]), entry["size"], entry.get("blob_id")) for entry in entries]
    digest = hashlib.sha256(repr(content).encode()).hexdigest()
    return Corpus(
        files["train"], reader(data), digest, headline, facts, files["validation"] or None, sum(sizes) / max(sizes)
    )


def write_whole(path: Path, content: bytes) -> None:
    """Write a cache file so that it is there complete or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{uuid.uuid4()}")
        aside.write_bytes(content)
        aside.replace(path)
    except OSError as error:
        raise UserError(f"data.cache={path.parent}: {error.strerror}; name a folder that can be written") from None
