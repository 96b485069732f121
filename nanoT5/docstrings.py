"""The corpus that is on every machine: what the docstrings of Python and of its packages say."""

import ast
import functools
import gc
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import platform
import re
import sysconfig
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from nanoT5.sources import Corpus, read, write_whole

# Folders of no interest to a reader of documentation: tests, and copies of other packages.
SKIPPED = {"test", "tests", "testing", "_vendor", "site-packages", "idlelib"}


def corpus(data, cache: Path) -> Corpus:
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
    headline += f"{facts['bytes'] / 1e6:.1f} MB, sha256 {facts['sha256'][:16]}"
    return Corpus(
        [str(path)], functools.partial(read, column="text", document="file"), facts["sha256"], headline, facts
    )


def requirements_closure() -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that requirements.txt names, then those that they require, by normalised name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    listed = (Path(__file__).parent.parent / "requirements.txt").read_text().splitlines()
    queue = deque(Requirement(line) for line in listed if line.strip() and not line.startswith("#"))
    found: dict[str, importlib.metadata.Distribution] = {}
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
        modules |= {f"{name}/{f}": Path(str(package.locate_file(f))) for f in package.files or () if f.suffix == ".py"}
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
        stack: list[ast.AST] = [ast.parse(source)] if b'"""' in source else []
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
