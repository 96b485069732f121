"""Text to training batches. Each stage yields its items with all that is needed to go on from there:

  1. sources    files of documents, one document a row: (row number, text)
  2. streams    each of a fixed number of logical streams reads its own rows, epoch after epoch
  3. chunks     its documents, each closed by eos, are encoded, joined and cut into chunks of raw_length ids
  4. shuffle    chunks are permuted within blocks; the permutation is a function of the seed and the block's place
  5. batches    sample n of the training run is the next chunk of stream n modulo the number of streams
  6. corruption T5's span corruption, a function of the seed and n alone

So the batches depend on text, configuration and seed, never on how many workers make them. The whole state of a stream
is five integers: where its current block begins and how many of the block's chunks are used.

Shapes: B sequences, R = raw_length, S input tokens, T target tokens.
"""

import functools
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nanoT5 import UserError, sources
from nanoT5 import tokenizer as tokenizers
from nanoT5.sources import Corpus
from nanoT5.tokenizer import SENTINELS, Tokenizer

FIXED_SEED = 0  # of what does not follow the run's seed: the tokenizer's sample and the evaluation batches

# ---------------------------------------------------------------------------------------------------------------------
# Span corruption: Raffel et al. 2020, section 3.1.4, and t5.data.preprocessors of T5's code


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
    starts = np.zeros((rows, raw_length), dtype=np.int64)
    np.put_along_axis(starts, ends[:, :-1], 1, axis=1)
    segment = starts.cumsum(axis=1)  # 0 text, 1 noise, 2 text, ...
    starts[:, 0] = 1
    sentinels = sentinel_ids[segment // 2]

    def side(hidden: np.ndarray, kept: int) -> np.ndarray:
        first = hidden & (starts == 1)
        ids = np.where(first, sentinels, chunks)[first | ~hidden].reshape(rows, kept + spans)
        return np.concatenate([ids, np.full((rows, 1), eos_id)], axis=1)

    is_noise = segment % 2 == 1
    return side(is_noise, text), side(~is_noise, noise)


# ---------------------------------------------------------------------------------------------------------------------
# Streams, chunks, shuffling


@dataclass(frozen=True)
class Place:
    """Where a stream stands; (epoch, file, row) is the document in which its current block begins."""

    epoch: int = 0
    file: int = 0  # position in this epoch's order of the files
    row: int = 0
    skip: int = 0  # tokens of that document that belong to the block before
    used: int = 0  # chunks of the block already given out


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is for evaluation: decided by its content, so that neither order nor repetition matters."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) < share * 2**64


@dataclass(frozen=True)
class Documents:
    """The documents of stream number `number` of `streams`: either those for training or those held out."""

    files: list[str]
    held_out: float  # share of documents kept for evaluation, from none (0) to all (1)
    seed: int  # of the order of the files
    number: int = 0
    streams: int = 1
    evaluation: bool = False

    def read(self, epoch: int, file: int = 0, row: int = 0) -> Iterator[tuple[Place, str]]:
        """(place, text) of one epoch from a place on.

        Streams share out the rows of every file, to be of one size. Files that are not on this machine are read by one
        stream only, where there are enough for the streams to be of about one size still.
        """
        whole_files = "://" in self.files[0] and len(self.files) >= 16 * self.streams
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.files))
        for position in range(file, len(self.files)):
            if whole_files and order[position] % self.streams != self.number:
                continue
            path, first = self.files[order[position]], row if position == file else 0
            shift = self.number - order[position]  # else stream 0 would get all files of a single row

            def wanted(r: int, first=first, shift=shift) -> bool:
                return r >= first and (whole_files or (r - shift) % self.streams == 0)

            for r, text in sources.reader(path)(path, wanted):
                if text.strip() and is_held_out(text, self.held_out) == self.evaluation:
                    yield Place(epoch, position, r), text


@dataclass(frozen=True)
class Chunker:
    """Documents to chunks of raw_length ids, each document closed by eos."""

    documents: Documents
    encode: Callable[[list[str]], list[list[int]]]
    eos_id: int
    raw_length: int
    block: int  # chunks that are shuffled together

    def epoch(self, start: Place) -> Iterator[tuple[Place, np.ndarray]]:
        """(place, int32 (up to block, raw_length)) in the order of the text, without an epoch's last few tokens."""
        documents = self.documents.read(start.epoch, start.file, start.row)
        # documents not yet cut up; `skip` tokens of the first one are gone
        pending: deque[tuple[Place, np.ndarray]] = deque()
        skip, tokens, wanted = start.skip, -start.skip, self.block * self.raw_length
        while True:
            while tokens < wanted and (group := list(itertools.islice(documents, 64))):
                for (place, _), ids in zip(group, self.encode([text for _, text in group])):
                    pending.append((place, np.array([*ids, self.eos_id], dtype=np.int32)))
                    tokens += len(ids) + 1
            chunks = min(tokens // self.raw_length, self.block)
            if chunks < 1:
                return
            end = skip + chunks * self.raw_length
            ids = np.concatenate([ids for _, ids in pending])[skip:end]
            yield replace(pending[0][0], skip=skip), ids.reshape(chunks, self.raw_length)
            tokens -= chunks * self.raw_length
            while pending and len(pending[0][1]) <= end:
                end -= len(pending.popleft()[1])
            skip = end

    def shuffled(self, start: Place) -> Iterator[tuple[Place, np.ndarray]]:
        """(place after it, chunk int32 (raw_length,)) without end, permuted within each block."""
        seed, number = self.documents.seed, self.documents.number
        epoch_start, empty = replace(start, used=0), False
        while not empty:
            empty = True
            for place, block in self.epoch(epoch_start):
                order = np.random.default_rng([seed, number, *astuple(place)]).permutation(len(block))
                used = start.used if place == replace(start, used=0) else 0
                for i in range(used, len(block)):
                    yield replace(place, used=i + 1), block[order[i]]
                empty = False
            epoch_start = Place(epoch_start.epoch + 1)
        raise UserError(
            f"the corpus is too small: stream {number + 1} of {self.documents.streams} has fewer than "
            f"{self.raw_length} tokens; give more text, a smaller data.input_length or fewer data.streams"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class Parts(IterableDataset):
    """Without end, a worker's share of each batch: sample numbers (B,), input_ids, labels, places of its streams."""

    def __init__(self, streams: list[Chunker], batch_size: int, corruption: Callable, state: dict):
        self.streams, self.batch_size, self.corruption, self.state = streams, batch_size, corruption, state

    def __iter__(self):
        worker = get_worker_info()
        mine = range(worker.id, len(self.streams), worker.num_workers) if worker else range(len(self.streams))
        chunks = {s: self.streams[s].shuffled(Place(*self.state["places"][s])) for s in mine}
        for first in itertools.count(self.state["samples"], self.batch_size):
            samples = [n for n in range(first, first + self.batch_size) if n % len(self.streams) in mine]
            try:
                taken = [next(chunks[n % len(self.streams)]) for n in samples]
                places = {n % len(self.streams): place for n, (place, _) in zip(samples, taken)}
                if first == 0 and any(place.epoch for place in places.values()):
                    raise UserError(f"the corpus is smaller than a batch: lower optim.batch_size={self.batch_size}")
            except UserError as error:
                yield error  # raised in a worker process it would arrive wrapped in a traceback
                return
            index = np.array(samples, dtype=np.int64)
            # a worker may have no part in a batch that is smaller than the number of streams
            rows = np.array([chunk for _, chunk in taken], dtype=np.int32)
            rows = rows.reshape(len(taken), self.streams[0].raw_length)
            yield index, *self.corruption(rows, index), places


def leave_process_group(worker: int) -> None:
    """A terminal's Ctrl-C and a scheduler's SIGTERM go to the whole group; only the training process is to act on them.

    Ignoring SIGTERM instead would leave workers that cannot be ended.
    """
    os.setsid()


def training_batches(
    streams: list[Chunker], batch_size: int, corruption: Callable, workers: int, origin: dict, state: dict | None = None
) -> Iterator[tuple[dict[str, torch.Tensor], dict]]:
    """Endless (batch, state after it); the batch has int64 input_ids (B, S) and labels (B, T).

    Prefetching is harmless because the state travels with its batch: started from it, the batches go on as they would
    have. They are the same with any number of worker processes, each of which serves its own streams. origin names what
    else the batches depend on: a state can only be gone on from where that is the same.
    """
    state = state or {"samples": 0, "places": [list(astuple(Place()))] * len(streams), "origin": origin}
    if changed := [key for key in origin if state["origin"].get(key) != origin[key]]:
        raise UserError(f"checkpoint.resume: the checkpoint was made with another {' and another '.join(changed)}")
    loader = iter(
        DataLoader(
            Parts(streams, batch_size, corruption, state),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=8 if workers else None,
            worker_init_fn=leave_process_group,
        )
    )
    places = list(state["places"])
    for samples in itertools.count(state["samples"] + batch_size, batch_size):
        group = list(itertools.islice(loader, max(workers, 1)))
        for part in group:
            if isinstance(part, UserError):
                raise part
            for stream, place in part[3].items():
                places[stream] = list(astuple(place))
        index, input_ids, labels = (torch.cat([part[i] for part in group]) for i in range(3))
        order = index.argsort()
        state = {"samples": samples, "places": list(places), "origin": origin}
        yield {"input_ids": input_ids[order], "labels": labels[order]}, state


@dataclass(frozen=True)
class Data:
    corpus: Corpus
    tokenizer: Tokenizer
    raw_length: int
    target_length: int
    batches: Callable[..., Iterator[tuple[dict[str, torch.Tensor], dict]]]  # training_batches from a state
    evaluation: list[dict[str, torch.Tensor]]  # the held-out batches
    in_order: Callable[[], Iterator[dict[str, torch.Tensor]]]  # batches_in_order of the training text

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Of the targets, in nats; read from the text when it is first asked for."""
        return unigram_entropy(self.in_order())


# The corpus of a config's group data, by data.source; the second argument is its cache
SOURCES: dict[str, Callable[..., Corpus]] = {
    "docstrings": lambda data, cache: sources.docstrings(cache),
    "text": lambda data, cache: sources.text(data.path),
    "hub": lambda data, cache: sources.hub(data.name, data.config),
}


def build(cfg) -> Data:
    """The data of a run, from its whole config."""
    data = cfg.data
    cache = Path(data.cache).expanduser()
    corpus = SOURCES[data.source](data, cache)
    has_split = corpus.held_out_files is not None
    training = {"files": corpus.files, "held_out": 0.0 if has_split else data.held_out}
    evaluation = {"files": corpus.held_out_files, "held_out": 1.0} if has_split else training
    if data.tokenizer is None:
        texts = (text for _, text in Documents(**training, seed=FIXED_SEED).read(epoch=0))
        tokenizer = tokenizers.train(texts, data.vocab_size, cache)
    else:
        tokenizer = tokenizers.load(data.tokenizer)
    raw_length, target_length = span_lengths(data.input_length, data.mlm_probability, data.mean_noise_span_length)

    def chunker(block: int, **documents) -> Chunker:
        return Chunker(Documents(**documents), tokenizer.encode, tokenizer.eos_id, raw_length, block)

    noise = {"noise_density": data.mlm_probability, "mean_span_length": data.mean_noise_span_length}
    ids = {"sentinel_ids": tokenizer.sentinel_ids, "eos_id": tokenizer.eos_id}
    corruption = functools.partial(corrupt, **noise, **ids)
    batches = functools.partial(
        training_batches,
        [
            chunker(data.shuffle_block, **training, seed=cfg.seed, number=n, streams=data.streams)
            for n in range(data.streams)
        ],
        cfg.optim.batch_size,
        functools.partial(corruption, seed=cfg.seed),
        data.num_workers,
        {"corpus": corpus.digest, "tokenizer": tokenizer.sha256, "seed": cfg.seed}
        | {f"data.{key}": data[key] for key in ("input_length", "held_out", "streams", "shuffle_block")}
        | {"data.mlm_probability or data.mean_noise_span_length": list(noise.values())},
    )
    held_out = chunker(cfg.eval.batch_size, **evaluation, seed=FIXED_SEED, evaluation=True)
    held_out_batches = list(itertools.islice(batches_in_order(held_out, corruption), cfg.eval.steps))
    if not held_out_batches:
        raise UserError(
            f"data.held_out={data.held_out} leaves fewer than {raw_length} tokens of this corpus "
            f"for evaluation: raise it, or give more documents (in a .txt file, blank lines separate them)"
        )
    in_order = functools.partial(batches_in_order, chunker(1024, **training, seed=FIXED_SEED), corruption)
    return Data(corpus, tokenizer, raw_length, target_length, batches, held_out_batches, in_order)


def batches_in_order(chunker: Chunker, corruption: Callable) -> Iterator[dict[str, torch.Tensor]]:
    """The text once, block by block in its own order and always corrupted alike, whatever the run's seed."""
    samples = 0
    for _, chunks in chunker.epoch(Place()):
        index = np.arange(samples, samples + len(chunks))
        input_ids, labels = corruption(chunks, index, seed=FIXED_SEED)
        yield {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        samples += len(chunks)


def unigram_entropy(batches: Iterator[dict[str, torch.Tensor]], sample: int = 2**18) -> float:
    """Entropy in nats of the distribution of single target tokens: the loss of a model that knows nothing but that.

    From the first `sample` targets or so, with Miller's (1955) correction for tokens not seen in them.
    """
    labels = torch.empty(0, dtype=torch.int64)
    for batch in batches:
        labels = torch.cat([labels, batch["labels"].flatten()])
        if len(labels) >= sample:
            break
    counts = labels.bincount().double()
    counts = counts[counts > 0]
    share = counts / counts.sum()
    return (-(share * share.log()).sum() + (len(counts) - 1) / (2 * counts.sum())).item()
