import gzip
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from nanoT5 import UserError, data, sources


def read(path, first=0, step=1, column="text", document="paragraph"):
    return list(sources.read(str(path), first, step, column, document))


def corpus(path, **keys) -> sources.Corpus:
    return sources.text(SimpleNamespace(path=str(path), text_column="text", txt_document="paragraph", **keys), None)


def test_txt_documents_are_separated_by_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\r\n\r\n \r\nthree\n\n\nfour".encode())
    documents = [(0, "one\ntwo\n", None), (1, "three\n", None), (2, "four", None)]
    assert read(tmp_path / "a.txt") == documents
    assert read(tmp_path / "a.txt", 1, 2) == documents[1::2]
    assert read(tmp_path / "a.txt", document="file") == [(0, "one\ntwo\n\n \nthree\n\n\nfour", None)]


@pytest.mark.parametrize(
    "count, largest, alike", [(64, 1, True), (70, 1, True), (8, 1, True), (9, 1, False), (64, 40, False)]
)
def test_streams_share_out_whole_files_where_these_are_alike(tmp_path, count, largest, alike):
    """A file need not be read, or unpacked, by every stream then."""
    for file in range(count):
        rows = [f"file {file:02}, row {row:02}" for row in range(3 * (largest if file == 5 else 1))]
        (tmp_path / f"{file:02}.txt").write_text("\n\n".join(rows))
    streams = [
        [document.text.strip() for document in data.Documents(corpus(tmp_path), 0.0, 0, n, 4).read(0)][:-1]
        for n in range(4)
    ]
    texts = [text for stream in streams for text in stream]
    assert len(texts) == len(set(texts)) == 3 * (count - 1 + largest)
    files = [{text[:7] for text in stream} for stream in streams]
    assert (sum(map(len, files)) == count) == alike
    reader = data.Documents(corpus(tmp_path), 0.0, 0, 1, 4)
    for i, document in enumerate(list(reader.read(0))[:-1]):
        again = [document.text.strip() for document in reader.read(0, document.place.file, document.place.row)]
        assert again[:-1] == streams[1][i:]
    sizes = list(map(len, streams))
    assert max(sizes) <= 1.2 * min(sizes)


ROWS = ["The first document.", "", "The third, \u00e4\u00f6\u00fc.\nOf two lines.", "The last."]


def write_as(path: Path, rows: list[str]) -> Path:
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(rows)).encode()
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": list(range(len(rows))), "text": rows})
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    elif path.suffix == ".arrow":
        datasets.Dataset.from_dict({"text": rows}).save_to_disk(path.parent / "saved")
        (path.parent / "saved" / "data-00000-of-00001.arrow").rename(path)
    else:
        path.write_bytes({".gz": gzip.compress, ".zst": sources.zstd.compress}.get(path.suffix, bytes)(lines))
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.parquet", "a.arrow"]
)
def test_every_format_gives_the_same_rows(tmp_path, name):
    path = write_as(tmp_path / name, ROWS)
    rows = [(i, text, None if text else sources.EMPTY) for i, text in enumerate(ROWS)]
    assert read(path) == rows
    assert read(path, 2) == rows[2:]
    if path.suffix in (".parquet", ".arrow"):
        with pytest.raises(UserError, match="data.text_column=body is not in .*text"):
            read(path, column="body")
    else:
        assert {fault for _, _, fault in read(path, column="body")} == {'no string called "body"'}


def test_compressed_txt(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo"))
    assert read(tmp_path / "a.txt.gz") == [(0, "one\n", None), (1, "two", None)]


LONG = "word " * 2_000_000
DIRTY = [
    ('\ufeff{"text": "after a byte order mark"}'.encode(), "after a byte order mark", None),
    (b'{"text": "windows"}\r', "windows", None),
    (b'{"text": "cut', "", "not JSON"),
    (b"[" * 100_000, "", "not JSON"),
    (b'{"content": "x"}', "", 'no string called "text"'),
    (b'{"text": 3}', "", 'no string called "text"'),
    (b'["text"]', "", 'no string called "text"'),
    (b'{"text": " \\n"}', "", "empty"),
    (b"", "", "empty"),
    (b'{"text": "a\xff\xfeb"}', "a\ufffd\ufffdb", "invalid UTF-8, replaced"),
    (b'{"text": "a\\u0000b"}', "ab", "NUL, removed"),
    (b'{"text": "a\\ud800b"}', "a?b", None),  # JSON can spell code points that no text has
    (json.dumps({"text": LONG}).encode(), LONG, None),
    (b'{"text": "the last, without a line end"}', "the last, without a line end", None),
]


def test_dirty_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(line for line, _, _ in DIRTY))
    assert read(tmp_path / "a.jsonl") == [(row, text, fault) for row, (_, text, fault) in enumerate(DIRTY)]


def test_dirty_txt(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\0\r\n\r\n\xff\xfe two\n\n\0\n")
    assert read(tmp_path / "a.txt") == [
        (0, "one\n", "NUL, removed"),
        (1, "\ufffd\ufffd two\n", "invalid UTF-8, replaced"),
        (2, "", "NUL, removed"),
    ]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_was_cut_off(tmp_path, name):
    """What comes before the damage is read; one stream alone reports it."""
    rows = [f"{i} {hashlib.sha256(str(i).encode()).hexdigest()}" for i in range(20_000)]
    path = write_as(tmp_path / name, rows)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = read(path)
    assert found[-1][1:] == ("", "damaged from here on")
    whole = found[:-1]
    assert whole == [(i, rows[i], None) for i in range(len(whole))]
    assert name == "a.parquet" or len(whole) > 5_000  # whose table of contents is at its end
    streams = [read(path, n, 3) for n in range(3)]
    assert sorted(row for stream in streams for row in stream) == sorted(found)


def test_damage_within_a_table(tmp_path):
    rows = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(5_000)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, row_group_size=1_000, use_dictionary=False)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 5_000] = b"?" * 5_000
    path.write_bytes(content)
    *found, last = read(path)
    assert found == [(i, rows[i], None) for i in range(len(found))] and 1_000 <= len(found) <= 3_000
    assert last[2] == "damaged from here on"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_strings_of_a_table_that_are_not_utf8(tmp_path, name):
    texts = pyarrow.array([b"fine", b"a\xffb", None], pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"text": texts})
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        with pyarrow.ipc.new_stream(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    fault = 'no string called "text"'
    assert read(tmp_path / name) == [
        (0, "fine", None),
        (1, "a\ufffdb", "invalid UTF-8, replaced"),
        (2, "", fault),
    ]


def test_text_corpus_takes_files_folders_and_globs_and_names_what_it_cannot_read(tmp_path):
    for name in ("b.txt", "a.txt", "c.csv", "sub/d.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    names = {
        pattern: [Path(f).name for f in corpus(tmp_path / pattern).files]
        for pattern in ("", "*.txt", "**/*.gz", "a.txt")
    }
    assert names == {
        "": ["a.txt", "b.txt", "d.jsonl.gz"],
        "*.txt": ["a.txt", "b.txt"],
        "**/*.gz": ["d.jsonl.gz"],
        "a.txt": ["a.txt"],
    }
    (tmp_path / "x [1].txt").write_text("a name that would be a pattern")
    assert len(corpus(tmp_path / "x [1].txt").files) == 1
    for pattern, words in (("none*", "matches no file"), ("*.csv", "c.csv is not")):
        with pytest.raises(UserError, match=words):
            corpus(tmp_path / pattern)


def test_files_with_the_same_content_are_read_once(tmp_path):
    for name, text in (("b", "x" * 200_000), ("a", "x" * 200_000), ("c", "x" * 99_999 + "y" + "x" * 100_000)):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "d.txt").symlink_to("c.txt")
    found = corpus(tmp_path)
    assert [Path(f).name for f in found.files] == ["a.txt", "c.txt"]
    assert found.description["repeated_files"] == 2 and "2 more with the same content left out" in found.headline


def test_a_text_corpus_is_told_apart_by_its_content(tmp_path):
    (tmp_path / "a.txt").write_text("one text")
    before = corpus(tmp_path / "a.txt").digest
    assert corpus(tmp_path / "*.txt").digest == before
    (tmp_path / "a.txt").write_text("two text")
    assert corpus(tmp_path / "a.txt").digest != before


def test_a_folder_of_save_to_disk(tmp_path):
    def saved(path):
        return sources.saved(SimpleNamespace(path=str(path), text_column="text", txt_document="paragraph"), None)

    train, validation = (datasets.Dataset.from_dict({"text": rows}) for rows in (ROWS, ["held out"]))
    train.save_to_disk(tmp_path / "single", num_shards=2)
    datasets.DatasetDict({"train": train, "validation": validation}).save_to_disk(tmp_path / "both")
    single, both = saved(tmp_path / "single"), saved(tmp_path / "both")
    assert [text for file in single.files for _, text, _ in single.read(file, 0, 1)] == ROWS
    assert single.held_out_files is None
    assert [text for file in both.held_out_files for _, text, _ in both.read(file, 0, 1)] == ["held out"]
    with pytest.raises(UserError, match="not a folder of datasets.save_to_disk"):
        saved(tmp_path)
