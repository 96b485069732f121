import functools
import json
import pickle
from collections import Counter
from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoT5 import UserError, data, sources, tokenizer
from nanoT5.data import Chunker, Documents, Place

SENTINEL_IDS = 1099 - np.arange(100)
EOS = 1


def corrupt(chunks, index, seed, noise_density=0.15, mean_span_length=3.0):
    return data.corrupt(
        chunks,
        index,
        seed,
        noise_density=noise_density,
        mean_span_length=mean_span_length,
        sentinel_ids=SENTINEL_IDS,
        eos_id=EOS,
    )


def restore(inputs, labels):
    """Put every noise span of labels back in the place of its sentinel in inputs."""
    assert inputs[-1] == labels[-1] == EOS
    spans, chunk = {}, []
    for id in labels[:-1]:
        if id in SENTINEL_IDS:
            spans[id] = []
            current = spans[id]
        else:
            current.append(id)
    for id in inputs[:-1]:
        chunk += spans.pop(id) if id in SENTINEL_IDS else [id]
    assert not spans
    return chunk


@pytest.mark.parametrize(
    "input_length, density, mean, expected",
    [
        (64, 0.15, 3, (70, 14)),
        (128, 0.15, 3, (141, 29)),
        (256, 0.15, 3, (284, 58)),
        (512, 0.15, 3, (568, 114)),
        (1024, 0.15, 3, (1137, 229)),
        (64, 0.2, 2, (70, 22)),  # these two are goldens of T5's own tests
        (64, 0.2, 1, (63, 27)),
    ],
)
def test_span_lengths(input_length, density, mean, expected):
    assert data.span_lengths(input_length, density, mean) == expected


@pytest.mark.parametrize(
    "input_length, density, mean", [(2, 0.15, 3), (128, 0.001, 3), (128, 0.99, 3), (1810, 0.15, 3), (8, 0.15, 9)]
)
def test_degenerate_lengths_are_refused(input_length, density, mean):
    with pytest.raises(ValueError, match="spans"):
        data.span_lengths(input_length, density, mean)


def test_longest_input_that_the_sentinels_allow():
    raw, _ = data.span_lengths(1809, 0.15, 3)
    assert data.span_counts(raw, 0.15, 3)[1] == 100


lengths = st.tuples(st.integers(8, 300), st.floats(0.05, 0.6), st.floats(1, 6))


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(0, 2**40), st.integers(0, 2**32))
def test_corruption_hides_exactly_the_noise(shape, index, seed):
    try:
        raw, target_length = data.span_lengths(*shape)
    except ValueError:
        return
    noise, spans = data.span_counts(raw, *shape[1:])
    chunks = np.random.default_rng(seed).integers(2, 1000, (3, raw))
    inputs, labels = corrupt(chunks, np.arange(index, index + 3), seed, *shape[1:])
    assert inputs.shape == (3, raw - noise + spans + 1) and inputs.shape[1] <= shape[0]
    assert labels.shape == (3, target_length) == (3, noise + spans + 1)
    for chunk, row, label in zip(chunks, inputs, labels):
        assert restore(row.tolist(), label.tolist()) == chunk.tolist()
        for side in (row, label):
            assert side[side > 999].tolist() == SENTINEL_IDS[:spans].tolist()
        assert row[0] < 1000 and label[0] == SENTINEL_IDS[0]  # the text comes first


def test_corruption_depends_on_seed_and_index_alone():
    chunks = np.random.default_rng(0).integers(2, 1000, (16, 141))
    index = np.arange(40, 56)
    inputs, labels = corrupt(chunks, index, 5)
    for i in (3, 15):
        alone = corrupt(chunks[i : i + 1], index[i : i + 1], 5)
        assert (alone[0] == inputs[i]).all() and (alone[1] == labels[i]).all()
    assert (corrupt(chunks, index, 6)[0] != inputs).any(axis=1).all()
    assert (corrupt(chunks, index + 16, 5)[0] != inputs).any(axis=1).all()


def test_every_legal_mask_occurs_equally_often():
    raw, noise, spans = 12, 5, 3
    assert data.span_counts(raw, 0.42, 1.7) == (noise, spans)
    chunks = np.tile(np.arange(2, 2 + raw), (20_000, 1))
    inputs, _ = corrupt(chunks, np.arange(20_000), 0, 0.42, 1.7)
    found = Counter(map(tuple, inputs.tolist()))
    legal = comb(noise - 1, spans - 1) * comb(raw - noise - 1, spans - 1)
    assert len(found) == legal == 90
    expected = 20_000 / legal
    assert sum((n - expected) ** 2 / expected for n in found.values()) < 146  # chi-squared, 89 degrees, p = 1e-4


def test_span_lengths_at_568():
    chunks = np.tile(np.arange(2, 570), (2000, 1))
    _, labels = corrupt(chunks, np.arange(2000), 0)
    runs = np.diff(np.flatnonzero(labels.ravel() > 999).reshape(2000, 28), axis=1) - 1
    assert 85 / 28 == pytest.approx(runs.mean(), rel=0.02)  # 3.04
    assert (runs == 1).mean() == pytest.approx(27 / 84, abs=0.01)  # 32 % are single tokens
    assert np.quantile(runs, 0.95) == 8


def letters(texts):
    """A tokenizer for tests: a token a character."""
    return [[ord(c) % 900 + 2 for c in text] for text in texts]


def chunkers(path: Path, streams: int, block=7, held_out=0.2, seed=0):
    return [
        Chunker(Documents([str(path)], held_out, seed, n, streams), letters, EOS, raw_length=20, block=block)
        for n in range(streams)
    ]


def batches(path, workers=0, state=None, streams=4, batch_size=6, origin=None, **options):
    corruption = functools.partial(corrupt, seed=0)
    return data.training_batches(
        chunkers(path, streams, **options), batch_size, corruption, workers, origin or {}, state
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory, documents) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.jsonl"
    path.write_text("".join(json.dumps({"text": text[:300]}) + "\n" for text in documents[:40]))
    return path


def test_an_epoch_has_every_chunk_of_the_training_documents_once(small):
    texts = [text for _, text in sources.read_jsonl(str(small), lambda row: True)]
    training = [text for text in texts if not data.is_held_out(text, 0.2)]
    assert 0 < len(training) < len(texts)
    for n, chunker in enumerate(chunkers(small, 3)):
        mine = [text for row, text in enumerate(texts) if row % 3 == n and text in training]
        ids = np.concatenate([[*ids, EOS] for ids in letters(mine)])
        expected = ids[: len(ids) // 20 * 20].reshape(-1, 20).tolist()
        shuffled = chunker.shuffled(Place())
        for epoch in range(2):
            rows = [next(shuffled) for _ in expected]
            assert {place.epoch for place, _ in rows} == {epoch}
            found = [row.tolist() for _, row in rows]
            assert sorted(found) == sorted(expected) and found != expected


def test_held_out_documents_are_never_trained_on(small):
    evaluation = {text for _, text in Documents([str(small)], 0.2, 0, evaluation=True).read(0)}
    training = {text for n in range(3) for _, text in Documents([str(small)], 0.2, 0, n, 3).read(0)}
    assert evaluation and not evaluation & training
    assert evaluation | training == {text for _, text in sources.read_jsonl(str(small), lambda row: True)}


def take(iterator, count):
    return [
        (batch["input_ids"].tolist(), batch["labels"].tolist(), state)
        for _, (batch, state) in zip(range(count), iterator)
    ]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_do_not_change_the_batches(small, workers):
    assert take(batches(small, workers), 30) == take(batches(small), 30)


def test_batches_go_on_from_any_state(small):
    whole = take(batches(small), 200)
    assert whole[-1][2]["places"][0][0] >= 2  # epochs
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
    streams = [Documents(files, 1e-9, 0, n, 4) for n in range(4)]
    orders = [[[text.strip() for _, text in stream.read(epoch)] for stream in streams] for epoch in range(3)]
    for epoch in orders:
        assert sorted(text for texts in epoch for text in texts) == sorted(
            ["0.0", "0.1", "1.0", "1.1"] + [f"{i}.0" for i in range(2, 8)]
        )
        assert sorted(map(len, epoch)) == [2, 2, 3, 3]
        assert [sorted(texts) for texts in epoch] == [sorted(texts) for texts in orders[0]]
    assert orders[0] != orders[1] != orders[2]


def test_streams_share_out_many_remote_files(tmp_path):
    for i in range(33):
        (tmp_path / f"{i:02}.txt").write_text(f"{i}.0\n\n{i}.1")
    files = [f"file://{path}" for path in sorted(tmp_path.iterdir())]
    read = [[text.strip() for _, text in Documents(files, 0.0, 0, n, 2).read(0)] for n in range(2)]
    assert sorted(sum(read, [])) == sorted(f"{i}.{j}" for i in range(33) for j in range(2))
    assert [{int(text.split(".")[0]) % 2 for text in texts} for texts in read] == [{0}, {1}]
    stream = list(Documents(files, 0.0, 0, 1, 2).read(0))
    for i, (place, _) in enumerate(stream):
        assert list(Documents(files, 0.0, 0, 1, 2).read(0, place.file, place.row)) == stream[i:]


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


def test_a_state_of_other_data_is_refused(small):
    (_, _, state), *_ = take(batches(small, origin={"tokenizer": "a", "seed": 0, "data.streams": 4}), 1)
    take(batches(small, state=state, origin={"tokenizer": "a", "seed": 0, "data.streams": 4}), 1)
    with pytest.raises(UserError, match="another tokenizer and another data.streams"):
        take(batches(small, state=state, origin={"tokenizer": "b", "seed": 0, "data.streams": 8}), 1)


def test_what_workers_get_can_be_pickled(small, corpus, cache, tmp_path):
    """As it has to be where processes are spawned: macOS, and Linux from Python 3.14 on."""
    folder = tmp_path / "tokenizer"
    texts = [text for _, text in sources.read_jsonl(str(corpus), lambda row: True)]
    tokenizer.train(texts, 512, cache).save(folder)
    for path in (folder, folder / "spiece.model"):
        if path == folder:
            (folder / "spiece.model").rename(tmp_path / "spiece.model")
            encode = tokenizer.load(str(folder)).encode
        else:
            encode = tokenizer.load(str(tmp_path / "spiece.model")).encode
        assert pickle.loads(pickle.dumps(encode))(texts[:3]) == encode(texts[:3])


@pytest.mark.parametrize(
    "options, words", [({"batch_size": 3000}, "smaller than a batch"), ({"streams": 39}, "too small")]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_corpus_that_is_too_small_is_refused(small, options, words, workers):
    with pytest.raises(UserError, match=words):
        take(batches(small, workers, held_out=0.5, **options), 1)


def test_a_place_is_where_its_block_begins(small):
    chunker = chunkers(small, 1)[0]
    blocks = list(chunker.epoch(Place()))
    for i, (place, block) in enumerate(blocks):
        again_place, again = next(chunker.epoch(place))
        assert again_place == place == replace(place, used=0) and (again == block).all(), i
