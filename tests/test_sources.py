import gzip
import json
from pathlib import Path

import pytest

from nanoT5 import UserError, sources


def test_txt_documents_are_separated_by_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\r\n\r\n \r\nthree\n\n\nfour".encode())
    everything = list(sources.read_txt(str(tmp_path / "a.txt"), lambda row: True))
    assert everything == [
        (0, "one\ntwo\n"),
        (1, "three\n"),
        (2, "four"),
    ]
    assert list(sources.read_txt(str(tmp_path / "a.txt"), lambda row: row == 1)) == [(1, "three\n")]


@pytest.mark.parametrize("line", ['{"text": "cut', '{"content": "x"}', '{"text": 3}', '["text"]'])
def test_a_broken_jsonl_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match="a.jsonl, line 2"):
        list(sources.read_jsonl(str(path), lambda row: True))


def test_lone_surrogates_of_json_become_question_marks(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert list(sources.read_jsonl(str(tmp_path / "a.jsonl"), lambda row: True)) == [(0, "a?b")]


def test_text_corpus_takes_globs_and_names_what_it_cannot_read(tmp_path):
    for name in ("b.txt", "a.txt", "c.csv"):
        (tmp_path / name).write_text("text")
    assert [Path(f).name for f in sources.text(f"{tmp_path}/*.txt").files] == ["a.txt", "b.txt"]
    for pattern, words in (("none*", "matches no file"), ("*", "c.csv is not")):
        with pytest.raises(UserError, match=words):
            sources.text(f"{tmp_path}/{pattern}")


MODULE = '''"""Words of the module, long enough to count as a paragraph of prose.

>>> a.doctest()

Words of the module, long enough to count as a paragraph of prose.
"""
raise RuntimeError("imported")
class A:
    """A class explains in one sentence what it is there for, says this one."""
    if True:
        def method(self):
            """Short."""
        async def other(self):
            """An asynchronous method that says a thing which {} knows of."""
'''


def test_docstrings_corpus(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name, who in (("one.py", "nobody else"), ("two.py", "everybody"), ("test/three.py", "no reader")):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(MODULE.replace("{}", who))
    (library / "broken.py").write_text('"""Unclosed')
    (library / "empty.py").write_text("x = 1")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda _: str(library))
    monkeypatch.setattr(sources, "requirements_closure", dict)
    corpora = [sources.docstrings(tmp_path / cache) for cache in ("a", "b", "b")]
    assert len({corpus.description["sha256"] for corpus in corpora}) == 1
    rows = [json.loads(line) for line in Path(corpora[0].files[0]).read_text().splitlines()]
    texts = {row["module"]: row["text"].split("\n") for row in rows}
    assert [len(texts[f"python/{name}"]) for name in ("one.py", "two.py")] == [3, 1]
    assert len(texts) == 2 and "nobody else" in texts["python/one.py"][2] and "everybody" in texts["python/two.py"][0]
    assert corpora[0].description["documents"] == 2


def test_compressed_files(tmp_path):
    for name, content in (("a.jsonl.gz", '{"text": "one"}\n'), ("b.json.gz", '{"text": "two"}'), ("c.txt.gz", "three")):
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    files = sources.text(f"{tmp_path}/*").files
    assert [list(sources.reader(file)(file, lambda row: True)) for file in files] == [
        [(0, "one")],
        [(0, "two")],
        [(0, "three")],
    ]
    (tmp_path / "d.csv.gz").touch()
    with pytest.raises(UserError, match=r"d.csv.gz is not a .jsonl, .json, .txt file"):
        sources.text(f"{tmp_path}/*")
