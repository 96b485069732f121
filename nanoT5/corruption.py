"""T5's span corruption: Raffel et al. 2020, section 3.1.4, and t5.data.preprocessors of T5's own code.

Shapes: B sequences, R = raw_length, S input tokens, T target tokens.
"""

import numpy as np

from nanoT5.tokenizer import SENTINELS


def span_counts(raw_length: int, noise_density: float, mean_span_length: float) -> tuple[int, int]:
    """Noise tokens and noise spans in a chunk of raw_length tokens."""
    noise = round(raw_length * noise_density)
    return noise, round(noise / mean_span_length)


def span_lengths(input_length: int, noise_density: float, mean_span_length: float) -> tuple[int, int]:
    """(raw_length, target_length): the longest chunk whose corrupted input has at most input_length tokens.

    Both sides count one sentinel a span and the eos (T5's random_spans_helper). Raises ValueError where T5's scheme
    degenerates: no noise, no span, spans that would be empty, or more spans than there are sentinels.
    """

    def lengths(raw: int) -> tuple[int, int]:
        noise, spans = span_counts(raw, noise_density, mean_span_length)
        return raw - noise + spans + 1, noise + spans + 1

    raw = input_length - 1
    while lengths(raw + 1)[0] <= input_length:
        raw += 1
    if noise_density == 0.5 and lengths(raw)[1] > input_length:  # T5 makes targets as long as inputs here
        raw -= 1
    noise, spans = span_counts(raw, noise_density, mean_span_length)
    if not 1 <= spans <= min(noise, raw - noise, SENTINELS):
        raise ValueError(
            f"inputs of {input_length} tokens give {noise} noise tokens in {spans} spans among {raw} tokens: "
            f"between 1 and {SENTINELS} spans are needed, each of at least one token, and as much text between them"
        )
    return raw, lengths(raw)[1]


def random_bits(seed: int, index: np.ndarray, count: int) -> np.ndarray:
    """uint64 (len(index), count), a hash of (seed, index, position): the output function of splitmix64.

    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". A counter-based generator draws a
    whole batch at once while each row depends on its own index alone.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    key = mix(np.array([seed], dtype=np.uint64) * gamma)
    key = mix(key + index.astype(np.uint64)[:, None] * gamma)
    return mix(key + np.arange(1, count + 1, dtype=np.uint64) * gamma)


def random_segments(bits: np.ndarray, segments: int) -> np.ndarray:
    """Cut n items into `segments` non-empty runs, every way equally likely: run lengths, int64 (B, segments).

    bits: uint64 (B, n - 1), one random key for each place between two items; the smallest keys are the cuts.
    """
    cuts = np.sort(np.argsort(bits, axis=1)[:, : segments - 1], axis=1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=bits.shape[1] + 1)


def corrupt(
    chunks: np.ndarray,
    chunk_index: np.ndarray,
    seed: int,
    *,
    noise_density: float,
    mean_span_length: float,
    sentinel_ids: np.ndarray,
    eos_id: int,
) -> tuple[np.ndarray, np.ndarray]:
    """T5's span corruption of a batch: (input_ids, labels), int64 (B, S) and (B, T).

    chunks: int (B, R) token ids without sentinels. chunk_index: int (B,); the spans of a row depend only on seed and
    its index. Text and noise alternate, text first, each cut into the same number of spans. The input has the k-th
    noise span replaced by sentinel k, the labels the k-th text span; both end in eos.
    """
    rows, raw_length = chunks.shape
    noise, spans = span_counts(raw_length, noise_density, mean_span_length)
    text = raw_length - noise
    bits = random_bits(seed, chunk_index, raw_length - 2)
    text_lengths = random_segments(bits[:, : text - 1], spans)
    noise_lengths = random_segments(bits[:, text - 1 :], spans)
    ends = np.stack([text_lengths, noise_lengths], axis=2).reshape(rows, 2 * spans).cumsum(axis=1)
    starts = np.zeros((rows, raw_length), dtype=bool)
    np.put_along_axis(starts, ends[:, :-1], True, axis=1)
    is_noise = np.logical_xor.accumulate(starts, axis=1)
    starts[:, 0] = True

    def side(hidden: np.ndarray, kept: int) -> np.ndarray:
        first = hidden & starts
        ids = chunks.astype(np.int64)
        ids[first] = np.tile(sentinel_ids[:spans], rows)
        ids = ids[first | ~hidden].reshape(rows, kept + spans)
        return np.concatenate([ids, np.full((rows, 1), eos_id)], axis=1)

    return side(is_noise, text), side(~is_noise, noise)
