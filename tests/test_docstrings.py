import json
from pathlib import Path

from nanoT5 import docstrings

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
    monkeypatch.setattr(docstrings.sysconfig, "get_path", lambda _: str(library))
    monkeypatch.setattr(docstrings, "requirements_closure", dict)
    corpora = [docstrings.corpus(None, tmp_path / cache) for cache in ("a", "b", "b")]
    assert len({corpus.description["sha256"] for corpus in corpora}) == 1
    rows = [json.loads(line) for line in Path(corpora[0].files[0]).read_text().splitlines()]
    texts = {row["module"]: row["text"].split("\n") for row in rows}
    assert [len(texts[f"python/{name}"]) for name in ("one.py", "two.py")] == [3, 1]
    assert len(texts) == 2 and "nobody else" in texts["python/one.py"][2] and "everybody" in texts["python/two.py"][0]
    assert corpora[0].description["documents"] == 2
