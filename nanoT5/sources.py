"""Sources of text: files in which each row is a document, and the corpus that is on every machine.

A reader yields (row number, text) of the wanted rows of a file. What is here knows nothing of tokens.
"""

import ast
import gc
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import os
import platform
import re
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from glob import glob
from pathlib import Path, PurePath

import fsspec

from nanoT5 import UserError


@dataclass(frozen=True)
class Corpus:
    files: list[str]  # paths, or addresses that fsspec opens
    digest: str  # tells corpora apart
    headline: str  # printed
    description: dict  # stored with the run
    held_out_files: list[str] | None = None  # of a corpus with a validation split; else documents are held out


def read_jsonl(path: str, wanted: Callable[[int], bool]) -> Iterator[tuple[int, str]]:
    with fsspec.open(path, "rb", compression="infer") as lines:
        for row, line in enumerate(lines):
            if wanted(row) and line.strip():
                try:
                    text = json.loads(line)["text"]
                    if not isinstance(text, str):
                        raise TypeError
                except (ValueError, KeyError, TypeError):
                    raise UserError(f'{path}, line {row + 1}: expected a JSON object with a string "text"') from None
                yield row, text.encode(errors="replace").decode()  # JSON can spell code points that no text has


def read_txt(path: str, wanted: Callable[[int], bool]) -> Iterator[tuple[int, str]]:
    """Documents are separated by blank lines."""
    row, lines = 0, []
    with fsspec.open(path, "rt", compression="infer", encoding="utf-8-sig", errors="replace") as text:
        for line in itertools.chain(text, [""]):  # the empty last line closes the last document
            if line.strip():
                lines.append(line)
            elif lines:
                if wanted(row):
                    yield row, "".join(lines)
                row, lines = row + 1, []


READERS = {".jsonl": read_jsonl, ".json": read_jsonl, ".txt": read_txt}
FORMATS = f"{', '.join(READERS)} file, or one of these with .gz"


def reader(path: str) -> Callable[[str, Callable[[int], bool]], Iterator[tuple[int, str]]] | None:
    return READERS.get(PurePath(path.removesuffix(".gz")).suffix)


def text(pattern: str) -> Corpus:
    """The files of a path or glob, in the order of their names."""
    files = sorted(path for path in map(Path, glob(str(Path(pattern).expanduser()), recursive=True)) if path.is_file())
    if not files:
        raise UserError(f"data.path={pattern} matches no file: give a .txt or .jsonl file, or a quoted glob of them")
    if odd := [path for path in files if not reader(str(path))]:
        raise UserError(f"data.path: {odd[0]} is not a {FORMATS}")
    if locked := [path for path in files if not os.access(path, os.R_OK)]:
        raise UserError(f"data.path: {locked[0]} may not be read: change its permissions")
    size = sum(path.stat().st_size for path in files)
    if size == 0:
        raise UserError(f"data.path={pattern} has no text in it")
    facts = {"path": pattern, "files": len(files), "bytes": size}
    digest = hashlib.sha256(repr([(path.name, path.stat().st_size) for path in files]).encode()).hexdigest()
    headline = f"{pattern}: {len(files)} file{'s' * (len(files) > 1)}, {size / 1e6:.1f} MB"
    return Corpus(list(map(str, files)), digest, headline, facts)


def hub(name: str, config: str | None) -> Corpus:
    """The files of a data set's train and validation splits on the Hugging Face Hub, read as they are needed.

    Their addresses hold the repository's commit, so that a run goes on with the data that it began with.
    """
    import datasets

    try:
        splits = datasets.load_dataset_builder(name, config).config.data_files or {}
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data.name={name}, data.config={config} cannot be had from the Hub: {reason}") from None
    files = {split: list(map(str, splits.get(split, ()))) for split in ("train", "validation")}
    if not files["train"]:
        raise UserError(f"data.name={name} has no split called train")
    if odd := [path for paths in files.values() for path in paths if not reader(path)]:
        raise UserError(f"data.name={name}: {odd[0]} is not a {FORMATS}")
    headline = f"{name} {config or ''} on the Hub: {len(files['train']):,} files of training text"
    facts = {"name": name, "config": config, "files": len(files["train"]), "first": files["train"][0]}
    digest = hashlib.sha256(repr(files).encode()).hexdigest()
    return Corpus(files["train"], digest, headline, facts, files["validation"] or None)


# Folders of no interest to a reader of documentation: tests, and copies of other packages.
SKIPPED = {"test", "tests", "testing", "_vendor", "site-packages", "idlelib"}


def docstrings(cache: Path) -> Corpus:
    """English prose from the docstrings of the standard library and of the installed requirements, built once.

    Sources are parsed, never imported. A document is what one module says, its paragraphs in order, without code and
    without paragraphs that an earlier module had; modules follow each other in a fixed pseudo-random order. The corpus
    is a function of the installed versions, which name the cache file.
    """
    packages = requirements_closure()
    versions = {"python": platform.python_version()} | {name: package.version for name, package in packages.items()}
    recipe = [inspect.getsource(step) for step in (gather, parse, prose)]  # so that no stale corpus is read
    key = hashlib.sha256(repr((versions, recipe, sorted(SKIPPED))).encode()).hexdigest()[:16]
    path = cache / f"docstrings-{key}.jsonl"
    about = path.with_suffix(".json")
    if not about.is_file() or not path.is_file():
        documents = sorted(gather(packages), key=lambda item: hashlib.sha256(item[0].encode()).digest())
        content = "".join(
            json.dumps({"module": m, "text": t}, ensure_ascii=False) + "\n" for m, t in documents
        ).encode()
        facts = {
            "documents": len(documents),
            "bytes": sum(len(text.encode()) for _, text in documents),
            "sha256": hashlib.sha256(content).hexdigest(),
            "versions": versions,
        }
        write_whole(path, content)
        write_whole(about, json.dumps(facts, indent=1).encode())
    facts = json.loads(about.read_text())
    shown = ", ".join(f"{name} {version}" for name, version in itertools.islice(facts["versions"].items(), 10))
    headline = f"docstrings of {shown} and {len(facts['versions']) - 10} more: {facts['documents']:,} documents, "
    return Corpus(
        [str(path)], facts["sha256"], headline + f"{facts['bytes'] / 1e6:.1f} MB, sha256 {facts['sha256'][:16]}", facts
    )


def requirements_closure() -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that requirements.txt names, then those that they require, by normalised name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    listed = (Path(__file__).parent.parent / "requirements.txt").read_text().splitlines()
    queue = deque(Requirement(line) for line in listed if line.strip() and not line.startswith("#"))
    found = {}
    while queue:
        requirement = queue.popleft()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        queue.extend(map(Requirement, found[name].requires or []))
    return found


def gather(packages: dict[str, importlib.metadata.Distribution]) -> Iterator[tuple[str, str]]:
    """(module, its text) for every Python file that has prose in docstrings not seen before."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = {f"python/{path.relative_to(library).as_posix()}": path for path in library.rglob("*.py")}
    for name, package in packages.items():
        modules |= {f"{name}/{f}": Path(package.locate_file(f)) for f in package.files or () if f.suffix == ".py"}
    modules = {name: path for name, path in sorted(modules.items()) if not SKIPPED & set(name.split("/"))}
    seen = set()
    # a syntax tree is a million small objects without cycles: collecting among them doubles the time
    with ProcessPoolExecutor(initializer=gc.disable) as pool:
        for name, texts in zip(modules, pool.map(parse, modules.values(), chunksize=64)):
            paragraphs = [p for text in texts for p in prose(text)]
            new = [p for p in dict.fromkeys(paragraphs) if p not in seen]
            seen.update(new)
            if new:
                yield name, "\n".join(new)


def parse(path: Path) -> list[str]:
    """The docstrings of a Python file in the order of its text; none if it cannot be parsed."""
    try:
        source = path.read_bytes()
        stack = [ast.parse(source)] if b'"""' in source else []
    except (OSError, SyntaxError, ValueError):
        return []
    found = []
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(ast.get_docstring(node))
        # only statements hold definitions: walking expressions too would take ten times as long
        stack.extend(child for child in reversed(list(ast.iter_child_nodes(node))) if isinstance(child, ast.stmt))
    return [text for text in found if text]


def prose(docstring: str) -> Iterator[str]:
    """The paragraphs that read as English: 40 characters or more, four fifths of them letters or spaces, no doctest."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        text = " ".join(paragraph.split())
        if len(text) >= 40 and ">>>" not in text and sum(c.isalpha() or c == " " for c in text) >= 0.8 * len(text):
            yield text


def write_whole(path: Path, content: bytes) -> None:
    """Write a cache file so that it is there complete or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_bytes(content)
        aside.replace(path)
    except OSError as error:
        raise UserError(f"data.cache={path.parent}: {error.strerror}; name a folder that can be written") from None
