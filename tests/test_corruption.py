from collections import Counter
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoT5 import corruption

SENTINEL_IDS = 1099 - np.arange(100)
EOS = 1


def corrupt(chunks, index, seed, noise_density=0.15, mean_span_length=3.0):
    return corruption.corrupt(
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
    assert corruption.span_lengths(input_length, density, mean) == expected


@pytest.mark.parametrize(
    "input_length, density, mean", [(2, 0.15, 3), (128, 0.001, 3), (128, 0.99, 3), (1810, 0.15, 3), (8, 0.15, 9)]
)
def test_degenerate_lengths_are_refused(input_length, density, mean):
    with pytest.raises(ValueError, match="spans"):
        corruption.span_lengths(input_length, density, mean)


def test_longest_input_that_the_sentinels_allow():
    raw, _ = corruption.span_lengths(1809, 0.15, 3)
    assert corruption.span_counts(raw, 0.15, 3)[1] == 100


lengths = st.tuples(st.integers(8, 300), st.floats(0.05, 0.6), st.floats(1, 6))


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(0, 2**40), st.integers(0, 2**32))
def test_corruption_hides_exactly_the_noise(shape, index, seed):
    try:
        raw, target_length = corruption.span_lengths(*shape)
    except ValueError:
        return
    noise, spans = corruption.span_counts(raw, *shape[1:])
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
    assert corruption.span_counts(raw, 0.42, 1.7) == (noise, spans)
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
