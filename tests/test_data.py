import functools
import itertools
import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoT5 import UserError, data, sources, tokenizer
from nanoT5.data import Chunker, Documents, Place

EOS = 1
corrupt = functools.partial(
    data.corrupt, noise_density=0.15, mean_span_length=3.0, sentinel_ids=1099 - np.arange(100), eos_id=EOS
)


def letters(texts):
    """A tokenizer for tests: a token a character."""
    return [[ord(c) % 900 + 2 for c in text] for text in texts]


def read(path, first=0, step=1, column="text", document="paragraph"):
    return list(sources.read(str(path), first, step, column, document))


def corpus_of(*paths, held_out_files=None, document="paragraph") -> sources.Corpus:
    reader = functools.partial(sources.read, column="text", document=document)
    return sources.Corpus(list(map(str, paths)), reader, "", "", {}, held_out_files)


def chunkers(path: Path, streams: int, block=7, held_out=0.2, seed=0):
    return [
        Chunker(Documents(corpus_of(path), held_out, seed, n, streams), letters, EOS, raw_length=20, block=block)
        for n in range(streams)
    ]


def batches(path, workers=0, state=None, streams=4, batch_size=6, rank=0, world_size=1, **options):
    corruption = functools.partial(corrupt, seed=0)
    mixtures = [data.Mixture([chunker], [1.0]) for chunker in chunkers(path, streams, **options)]
    return data.training_batches(mixtures, batch_size, corruption, 0, workers, state, rank, world_size)


@pytest.fixture(scope="module")
def small(tmp_path_factory, documents) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.jsonl"
    path.write_text("".join(json.dumps({"text": text[:300]}) + "\n" for text in documents[:40]))
    return path


def test_an_epoch_has_every_chunk_of_the_training_documents_once(small):
    texts = [text for _, text, _ in read(small)]
    training = [text for text in texts if not data.is_held_out(text, 0.2)]
    assert 0 < len(training) < len(texts)
    for n, chunker in enumerate(chunkers(small, 3)):
        mine = [text for row, text in enumerate(texts) if row % 3 == n and text in training]
        ids = np.concatenate([[*ids, EOS] for ids in letters(mine)])
        expected = ids[: len(ids) // 20 * 20].reshape(-1, 20).tolist()
        shuffled = chunker.shuffled(Place())
        for epoch in range(2):
            rows = [next(shuffled) for _ in expected]
            assert {place.epoch for place, *_ in rows} == {epoch}
            found = [row.tolist() for _, row, _ in rows]
            assert sorted(found) == sorted(expected) and found != expected


def test_held_out_documents_are_never_trained_on(small):
    evaluation = set(texts_of(Documents(corpus_of(small), 0.2, 0, evaluation=True)))
    training = {text for n in range(3) for text in texts_of(Documents(corpus_of(small), 0.2, 0, n, 3))}
    assert evaluation and not evaluation & training
    assert evaluation | training == {text for _, text, _ in read(small)}


def texts_of(documents: Documents, *place: int) -> list[str]:
    return [document.text for document in documents.read(*(place or (0,)))][:-1]  # the last one has none


def take(iterator, count):
    return [
        (batch["input_ids"].tolist(), batch["labels"].tolist(), state)
        for _, (batch, state, _) in zip(range(count), iterator)
    ]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_do_not_change_the_batches(small, workers):
    assert take(batches(small, workers), 30) == take(batches(small), 30)


def test_batches_go_on_from_any_state(small):
    whole = take(batches(small), 200)
    assert whole[-1][2]["places"][0][0][0] >= 2  # epochs
    for i in range(0, 190, 9):
        state = json.loads(json.dumps(whole[i][2]))
        assert take(batches(small, state=state), 8) == whole[i + 1 : i + 9]


def test_batch_size_does_not_change_the_samples(small):
    rows = [
        [row for batch in take(batches(small, batch_size=size), 24 // size) for row in batch[0]] for size in (2, 4, 12)
    ]
    assert rows[0] == rows[1] == rows[2]


def test_streams_share_out_the_rows_of_every_file(tmp_path):
    """Also where every file has a single row; the order of files changes from epoch to epoch."""
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"{i}.0\n\n{i}.1" if i < 2 else f"{i}.0")
    files = sorted(map(str, tmp_path.iterdir()))
    streams = [Documents(corpus_of(*files), 1e-9, 0, n, 4) for n in range(4)]
    orders = [[[text.strip() for text in texts_of(stream, epoch)] for stream in streams] for epoch in range(3)]
    for epoch in orders:
        assert sorted(text for texts in epoch for text in texts) == sorted(
            ["0.0", "0.1", "1.0", "1.1"] + [f"{i}.0" for i in range(2, 8)]
        )
        assert sorted(map(len, epoch)) == [2, 2, 3, 3]
        assert [sorted(texts) for texts in epoch] == [sorted(texts) for texts in orders[0]]
    assert orders[0] != orders[1] != orders[2]


def test_unigram_entropy():
    """That of a known distribution, also from a sample that misses some of its tokens; and of one token."""
    shares = torch.arange(1, 2001, dtype=torch.float64)
    shares /= shares.sum()
    known = -(shares * shares.log()).sum().item()
    labels = torch.multinomial(shares, 2**15, replacement=True, generator=torch.Generator().manual_seed(0))
    assert data.unigram_entropy([{"labels": labels.reshape(-1, 8)}]) == pytest.approx(known, abs=0.01)
    plain = np.unique(labels, return_counts=True)[1] / len(labels)
    assert known + (plain * np.log(plain)).sum() > 0.02  # without the correction
    assert data.unigram_entropy([{"labels": torch.full((4, 4), 7)}]) == 0
    assert data.unigram_entropy([{"labels": labels[:64]}, {"labels": labels}], sample=64) < 5  # the first are enough


@pytest.mark.parametrize("workers", [2, 4])
def test_a_batch_smaller_than_the_streams(small, workers):
    assert take(batches(small, workers, batch_size=1), 12) == take(batches(small, batch_size=1), 12)


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_out_the_batches(small, world_size):
    """Each gets every world_size-th sample; from their merged state any number of processes goes on alike."""
    alone = take(batches(small, batch_size=8), 60)
    ranks = [take(batches(small, batch_size=8, rank=r, world_size=world_size), 60) for r in range(world_size)]
    for i, (inputs, labels, state) in enumerate(alone):
        for r in range(world_size):
            assert ranks[r][i][:2] == (inputs[r::world_size], labels[r::world_size])
        assert data.merged([ranks[r][i][2] for r in range(world_size)]) == state
    state = data.merged([ranks[r][30][2] for r in range(world_size)])
    assert take(batches(small, batch_size=8, state=state), 10) == alone[31:41]
    again = [take(batches(small, batch_size=8, state=state, rank=r, world_size=2), 10) for r in range(2)]
    assert [data.merged([a[2], b[2]]) for a, b in zip(*again)] == [state for _, _, state in alone[31:41]]


def test_what_workers_get_can_be_pickled(small, corpus, cache, tmp_path):
    """As it has to be where processes are spawned: macOS, and Linux from Python 3.14 on."""
    folder = tmp_path / "tokenizer"
    texts = [text for _, text, _ in read(corpus)]
    tokenizer.train(texts, 512, cache).save(folder)
    for path in (folder, folder / "spiece.model"):
        if path == folder:
            (folder / "spiece.model").rename(tmp_path / "spiece.model")
            encode = tokenizer.load(str(folder)).encode
        else:
            encode = tokenizer.load(str(tmp_path / "spiece.model")).encode
        assert all(map(np.array_equal, pickle.loads(pickle.dumps(encode))(texts[:3]), encode(texts[:3])))


@pytest.mark.parametrize(
    "options, words", [({"batch_size": 3000}, "smaller than a batch"), ({"streams": 39}, "too small")]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_corpus_that_is_too_small_is_refused(small, options, words, workers):
    with pytest.raises(UserError, match=words):
        take(batches(small, workers, held_out=0.5, **options), 1)


def dirty(path: Path, documents: list[str]) -> Path:
    lines = [json.dumps({"text": text[:300]}) for text in documents[:40]]
    lines[3:3] = ["", '{"text": "cut']
    lines[20:20] = ['{"content": 1}', json.dumps({"text": "\0 nul"})]
    path.write_text("\n".join(lines) + "\n{broken")
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_and_every_token_is_accounted_for(tmp_path, documents, workers):
    path = dirty(tmp_path / "dirty.jsonl", documents)
    rows = 45
    stream = batches(path, workers, streams=3, batch_size=3)
    states, faults = [], []
    while not states or min(place[0] for (place,) in states[-1]["places"]) < 3:
        _, state, more = next(stream)
        states.append(state)
        faults += more
    counts = states[-1]["counts"]
    # whole epochs, and what the streams that are ahead have read of the next one
    assert counts["documents"] + counts["documents_held_out"] + counts["documents_skipped"] == pytest.approx(
        3 * rows, abs=rows
    )
    assert sorted({fault for fault in faults}) == [
        f'{path}, line 21: no string called "text"',
        f"{path}, line 22: NUL, removed",
        f"{path}, line 45: not JSON",
        f"{path}, line 5: not JSON",
    ]
    assert counts["not JSON"] >= 6 and counts["empty"] >= 3 and counts["NUL, removed"] >= 3

    # one stream, up to the last chunk of an epoch
    (chunker,) = chunkers(path, 1)
    blocks = list(chunker.epoch(Place()))
    total = sum((reading.counts for _, _, reading in blocks), Counter())
    assert total["documents"] + total["documents_held_out"] + total["documents_skipped"] == rows
    assert (total["documents_skipped"], total["not JSON"], total["empty"]) == (4, 2, 1)
    training = texts_of(Documents(corpus_of(path), 0.2, 0))
    assert total["tokens"] == sum(len(text) + 1 for text in training)
    assert total["tokens"] == 20 * sum(len(block) for _, block, _ in blocks) + total["tokens_dropped"]
    assert 0 < total["tokens_dropped"] < 20

    # the counts are part of the state, and go on from it
    for i in range(0, len(states) - 12, 7):
        resumed = batches(path, workers, states[i], streams=3, batch_size=3)
        assert [state["counts"] for _, state, _ in itertools.islice(resumed, 10)] == [
            state["counts"] for state in states[i + 1 : i + 11]
        ]


def test_what_is_wrong_can_end_a_run(tmp_path, documents):
    path = dirty(tmp_path / "dirty.jsonl", documents)
    with pytest.raises(UserError, match="dirty.jsonl, line 5: not JSON .data.on_error=raise"):
        texts_of(Documents(corpus_of(path), 0.2, 0, on_error="raise"))


def test_a_mixture_draws_its_sources_by_weight(tmp_path, documents):
    """And goes on from any state, with any number of workers and processes."""
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(letter * 400 for _ in range(40)))

    def mixed(workers=0, state=None, rank=0, world_size=1):
        parts = [chunkers(tmp_path / f"{name}.txt", 4, held_out=0.0) for name in "ab"]
        mixtures = [data.Mixture(list(chunkers), [3.0, 1.0]) for chunkers in zip(*parts)]
        corruption = functools.partial(corrupt, seed=0)
        return data.training_batches(mixtures, 8, corruption, 5, workers, state, rank, world_size)

    whole = take(mixed(), 250)
    inputs = np.array([inputs for inputs, _, _ in whole])
    a, b = (((inputs == ord(letter) % 900 + 2).any(-1)).sum() for letter in "ab")
    assert a + b == 2000 and a == pytest.approx(1500, abs=4 * (2000 * 3 / 16) ** 0.5)
    assert take(mixed(workers=2), 20) == whole[:20]
    assert take(mixed(state=whole[99][2]), 20) == whole[100:120]
    ranks = [take(mixed(rank=r, world_size=2, state=whole[99][2]), 5) for r in range(2)]
    assert [ranks[r][4][0] for r in range(2)] == [whole[104][0][r::2] for r in range(2)]
    both = data.Mixture([chunkers(tmp_path / f"{name}.txt", 1, held_out=0.0)[0] for name in "ab"], [1.0, 9.0])
    reading = data.Reading()
    lengths = [len(batch["input_ids"]) for batch in data.batches_in_order(both, 50, corrupt, reading)]
    assert lengths[:-1] == [50] * (len(lengths) - 1)
    # all of the text of both, though one of them has no more long before the other
    assert sum(lengths) == sum(len(block) for chunker in both.chunkers for _, block, _ in chunker.epoch(Place()))
    assert reading.counts["tokens"] - reading.counts["tokens_dropped"] == 20 * sum(lengths)


def test_text_of_which_nothing_can_be_read_is_noticed_soon(tmp_path):
    lines = [json.dumps({"text" if n > 20_000 else "txt": f"document {n}"}) + "\n" for n in range(30_000)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match='a.jsonl, line 10001: no string called "text", .* see data.text_column'):
        list(Documents(corpus_of(tmp_path / "a.jsonl"), 0.0, 0).read(0))
    (tmp_path / "b.jsonl").write_text("".join(lines[-1:] + lines))
    *documents, last = Documents(corpus_of(tmp_path / "b.jsonl"), 0.0, 0).read(0)
    counts = sum((document.reading.counts for document in documents), last.reading.counts)
    assert counts["documents"] == 10_000 and counts["documents_skipped"] == 20_001
    assert max(len(document.reading.faults) for document in documents) == data.NAMED


def test_a_place_is_where_its_block_begins(small):
    chunker = chunkers(small, 1)[0]
    blocks = list(chunker.epoch(Place()))
    assert len(blocks) > 5
    for i, (place, block, _) in enumerate(blocks):
        again_place, again, _ = next(chunker.epoch(place))
        assert again_place == place == place._replace(used=0) and (again == block).all(), i
