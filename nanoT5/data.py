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
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nanoT5 import UserError, docstrings, sources
from nanoT5 import tokenizer as tokenizers
from nanoT5.corruption import corrupt, random_bits, span_lengths
from nanoT5.sources import Corpus
from nanoT5.tokenizer import Tokenizer

NAMED = 20  # faults at a time that are named, file and line; all are counted
HOPELESS = 10_000  # rows with faults at the beginning of an epoch, after which it is taken for a mistake of the user's
FIXED_SEED = 0  # of what does not follow the run's seed: the tokenizer's sample and the evaluation batches
DRAWS = 2**32  # added to a seed where it draws sources, so that it does not draw a sample's spans with the same numbers
SOURCES: dict[str, Callable[..., Corpus]] = {
    "docstrings": docstrings.corpus,
    "text": sources.text,
    "saved": sources.saved,
    "hub": sources.hub,
}
# the keys of data that say what a source reads
PART = ("source", "path", "name", "config", "text_column", "txt_document")

# ---------------------------------------------------------------------------------------------------------------------
# Streams, chunks, shuffling


class Place(NamedTuple):
    """Where a stream stands; (epoch, file, row) is the document in which its current block begins."""

    epoch: int = 0
    file: int = 0  # position in this epoch's order of the files
    row: int = 0
    skip: int = 0  # tokens of that document that belong to the block before
    used: int = 0  # chunks of the block already given out


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is for evaluation: decided by its content, so that neither order nor repetition matters."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) < share * 2**64


@dataclass
class Reading:
    """What was read: how many documents and tokens of which kind, and what was wrong with them, in words."""

    counts: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: "Reading") -> None:
        self.counts.update(other.counts)
        self.faults = (self.faults + other.faults)[:NAMED]


class Document(NamedTuple):
    place: Place
    text: str
    reading: Reading  # since the document before, this one included


@dataclass(frozen=True)
class Documents:
    """The documents of stream number `number` of `streams`: either those for training or those held out."""

    corpus: Corpus
    held_out: float  # share of documents kept for evaluation where the corpus has no files for it
    seed: int  # of the order of the files
    number: int = 0
    streams: int = 1
    evaluation: bool = False
    on_error: str = "skip"  # or "raise"

    def read(self, epoch: int, file: int = 0, row: int = 0) -> Iterator[Document]:
        """One epoch from a place on; a last one without text has the counts of what followed the last with text.

        Streams share out the rows of every file, or whole files where that comes to about the same.
        """
        split = self.corpus.held_out_files
        files = split if self.evaluation and split else self.corpus.files
        share = 1.0 if self.evaluation and split else 0.0 if split else self.held_out
        even = len(files) % self.streams == 0 and self.corpus.equal_files >= 0.9 * len(files)
        whole_files = even or self.corpus.equal_files >= 16 * self.streams
        order = np.random.default_rng([self.seed, epoch]).permutation(len(files))
        reading, hopeless = Reading(), True
        for position in range(file, len(files)):
            shift = self.number - order[position]  # else stream 0 would get all files of a single row
            if whole_files and shift % self.streams:
                continue
            path, first, step = files[order[position]], row if position == file else 0, 1
            if not whole_files:
                first, step = first + (shift - first) % self.streams, self.streams
            for r, text, fault in self.corpus.read(path, first, step):
                if fault:
                    if fault != sources.EMPTY:
                        words = f"{path}, {sources.FORMATS[sources.ending(path)][2]} {r + 1}: {fault}"
                        if self.on_error == "raise":
                            raise UserError(f"{words} (data.on_error=raise)")
                        reading.faults = [*reading.faults, words][:NAMED]
                        if hopeless and reading.counts["documents_skipped"] >= HOPELESS:
                            raise UserError(f"{words}, after {HOPELESS:,} without text: see data.text_column")
                    reading.counts[fault] += 1
                if not text:
                    reading.counts["documents_skipped"] += 1
                elif is_held_out(text, share) != self.evaluation:
                    reading.counts["documents_held_out"] += 1
                else:
                    reading.counts["documents"] += 1
                    hopeless = False
                    yield Document(Place(epoch, position, r), text, reading)
                    reading = Reading()
        yield Document(Place(epoch, len(files)), "", reading)


@dataclass(frozen=True)
class Chunker:
    """Documents to chunks of raw_length ids, each document closed by eos."""

    documents: Documents
    encode: Callable[[list[str]], list[np.ndarray]]  # to int32 ids
    eos_id: int
    raw_length: int
    block: int  # chunks that are shuffled together

    def epoch(self, start: Place) -> Iterator[tuple[Place, np.ndarray, Reading]]:
        """(place, int32 (up to block, raw_length), what was read for it) in the order of the text.

        The last block is empty: its reading has the documents after the last chunk, and the tokens left of an epoch.
        """
        documents = self.documents.read(start.epoch, start.file, start.row)
        # documents not yet cut up; `skip` tokens of the first one are gone
        pending: deque[tuple[Document, np.ndarray]] = deque()
        skip, tokens, wanted = start.skip, -start.skip, self.block * self.raw_length
        while True:
            while tokens < wanted and (group := list(itertools.islice(documents, 64))):
                for document, ids in zip(group, self.encode([document.text for document in group])):
                    ids = np.append(ids, np.int32(self.eos_id)) if document.text else ids
                    document.reading.counts["tokens"] += len(ids)
                    pending.append((document, ids))
                    tokens += len(ids)
            chunks = min(tokens // self.raw_length, self.block)
            end = skip + chunks * self.raw_length
            ids = np.concatenate([ids for _, ids in pending])[skip:end]
            place, reading = pending[0][0].place._replace(skip=skip), Reading()
            begun = 0  # tokens before a document
            for i, (document, its) in enumerate(pending):
                if begun >= end and chunks:
                    break
                if i or not skip:  # else it was counted with the block in which it begins
                    reading.add(document.reading)
                begun += len(its)
            if not chunks:
                reading.counts["tokens_dropped"] += tokens
                yield place, np.empty((0, self.raw_length), dtype=np.int32), reading
                return
            yield place, ids.reshape(chunks, self.raw_length), reading
            tokens -= chunks * self.raw_length
            while end and len(pending[0][1]) <= end:
                end -= len(pending.popleft()[1])
            skip = end

    def shuffled(self, start: Place) -> Iterator[tuple[Place, np.ndarray, Reading]]:
        """(place after it, chunk int32 (raw_length,), what was read for it) without end, permuted within each block."""
        seed, number = self.documents.seed, self.documents.number
        epoch_start, empty, reading = start._replace(used=0), False, Reading()
        while not empty:
            empty = True
            for place, block, more in self.epoch(epoch_start):
                reading.add(more)
                order = np.random.default_rng([seed, number, *place]).permutation(len(block))
                used = start.used if place == start._replace(used=0) else 0
                for i in range(used, len(block)):
                    yield place._replace(used=i + 1), block[order[i]], reading if i == 0 else Reading()
                if len(block):
                    empty, reading = False, Reading()
            epoch_start = Place(epoch_start.epoch + 1)
        raise UserError(
            f"the corpus is too small: stream {number + 1} of {self.documents.streams} has fewer than "
            f"{self.raw_length} tokens; give more text, a smaller data.input_length or fewer data.streams"
            + "".join(f" ({fault})" for fault in reading.faults[:1])
        )


# ---------------------------------------------------------------------------------------------------------------------
# Batches


@dataclass(frozen=True)
class Mixture:
    """One stream of every source, and how often a sample comes from each."""

    chunkers: list[Chunker]
    weights: list[float]


def draw(weights: list[float], seed: int, index: np.ndarray) -> np.ndarray:
    """The source of every sample, int (B,), a function of the seed and of the sample's number alone."""
    share = random_bits(seed + DRAWS, index, 1)[:, 0] / 2.0**64
    return np.searchsorted(np.cumsum(weights) / sum(weights), share, side="right")


class Parts(IterableDataset):
    """Without end, a worker's share of a process's share of each batch.

    That is sample numbers (B,), input_ids, labels, places of its streams in every source, what was read for them.
    """

    def __init__(self, streams: dict[int, Mixture], batch_size: int, corruption: Callable, seed: int, state: dict):
        self.streams, self.batch_size, self.corruption = streams, batch_size, corruption
        self.seed, self.state = seed, state

    def __iter__(self):
        worker = get_worker_info()
        mine = list(self.streams)[worker.id :: worker.num_workers] if worker else list(self.streams)
        total = len(self.state["places"])
        places = {s: [Place(*place) for place in self.state["places"][s]] for s in mine}
        chunks = {s: [c.shuffled(p) for c, p in zip(self.streams[s].chunkers, places[s])] for s in mine}
        mixture = next(iter(self.streams.values()))
        for first in itertools.count(self.state["samples"], self.batch_size):
            index = np.array([n for n in range(first, first + self.batch_size) if n % total in mine], dtype=np.int64)
            rows = np.empty((len(index), mixture.chunkers[0].raw_length), dtype=np.int32)
            reading = Reading()
            try:
                for row, (n, source) in enumerate(zip(index, draw(mixture.weights, self.seed, index))):
                    places[n % total][source], rows[row], more = next(chunks[n % total][source])
                    reading.add(more)
                    if first == 0 and places[n % total][source].epoch:
                        raise UserError(f"the corpus is smaller than a batch: lower optim.batch_size={self.batch_size}")
            except UserError as error:
                yield error  # raised in a worker process it would arrive wrapped in a traceback
                return
            yield index, *self.corruption(rows, index), {s: places[s].copy() for s in mine}, reading


def begin_worker(worker: int) -> None:
    """Leave the process group, and do not outlive the training process.

    A terminal's Ctrl-C and a scheduler's SIGTERM go to the whole group; only the training process is to act on them.
    Ignoring SIGTERM instead would leave workers that cannot be ended.
    """
    os.setsid()
    # torch looks from here on whether the parent has become another one: if it has before, a worker would wait for ever
    parent = multiprocessing.parent_process()
    if multiprocessing.get_start_method() == "fork" and parent and os.getppid() != parent.pid:
        os._exit(1)


def training_batches(
    streams: list[Mixture],
    batch_size: int,
    corruption: Callable,
    seed: int,
    workers: int,
    state: dict | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[dict[str, torch.Tensor], dict, list[str]]]:
    """Endless (batch, state after it, faults); the batch has int64 input_ids (B, S) and labels (B, T).

    Prefetching is harmless because the state travels with its batch: started from it, the batches go on as they would
    have. Process `rank` of world_size gets every world_size-th sample of a batch, from streams of its own; together
    they get the same batches as one process, each of whose workers serves streams of its own too. Of the state, a
    process keeps up its own streams' places and adds to the counts what it reads: see merged().
    """
    state = state or {
        "samples": 0,
        "places": [[Place()] * len(mixture.chunkers) for mixture in streams],
        "counts": {},
    }
    own = {s: mixture for s, mixture in enumerate(streams) if s % world_size == rank}
    loader = iter(
        DataLoader(
            Parts(own, batch_size, corruption, seed, state),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=8 if workers else None,
            worker_init_fn=begin_worker,
        )
    )
    places, counts = list(state["places"]), Counter(state["counts"] if rank == 0 else {})
    for samples in itertools.count(state["samples"] + batch_size, batch_size):
        group, reading = list(itertools.islice(loader, max(workers, 1))), Reading()
        for part in group:
            if isinstance(part, UserError):
                raise part
            for stream, place in part[3].items():
                places[stream] = place
            reading.add(part[4])
        counts.update(reading.counts)
        index, input_ids, labels = (torch.cat([part[i] for part in group]) for i in range(3))
        order = index.argsort()
        state = {"samples": samples, "places": list(places), "counts": dict(counts)}
        yield {"input_ids": input_ids[order], "labels": labels[order]}, state, reading.faults


def merged(states: list[dict]) -> dict:
    """The state of all processes, from that of each."""
    places = [states[s % len(states)]["places"][s] for s in range(len(states[0]["places"]))]
    counts = sum((Counter(state["counts"]) for state in states), Counter())
    return {"samples": states[0]["samples"], "places": places, "counts": dict(counts)}


@dataclass(frozen=True)
class Data:
    corpora: list[Corpus]
    tokenizer: Tokenizer
    raw_length: int
    target_length: int
    origin: dict  # all that the batches depend on: a state can only be gone on from where it is the same
    batches: Callable[..., Iterator[tuple[dict[str, torch.Tensor], dict, list[str]]]]  # training_batches from a state
    evaluation: list[dict[str, torch.Tensor]]  # the held-out batches
    held_out: Reading  # what was read for them
    in_order: Callable[[], Iterator[dict[str, torch.Tensor]]]  # batches_in_order of the training text

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Of the targets, in nats; read from the text when it is first asked for."""
        return unigram_entropy(self.in_order())


def build(cfg) -> Data:
    """The data of a run, from its whole config."""
    data = cfg.data
    cache = Path(data.cache).expanduser()
    parts = parts_of(data)
    corpora = [SOURCES[part.source](part, cache) for part in parts]
    weights = [part.get("weight", 1.0) for part in parts]
    documents = [functools.partial(Documents, corpus, data.held_out, on_error=data.on_error) for corpus in corpora]
    if data.tokenizer is None:
        sample = alternating([texts(made(FIXED_SEED).read(epoch=0)) for made in documents], weights)
        tokenizer = tokenizers.train(sample, data.vocab_size, cache)
    else:
        tokenizer = tokenizers.load(data.tokenizer)
    raw_length, target_length = span_lengths(data.input_length, data.mlm_probability, data.mean_noise_span_length)

    def mixture(block: int, seed: int, **stream) -> Mixture:
        chunkers = [
            Chunker(made(seed, **stream), tokenizer.encode, tokenizer.eos_id, raw_length, block) for made in documents
        ]
        return Mixture(chunkers, weights)

    noise = {"noise_density": data.mlm_probability, "mean_span_length": data.mean_noise_span_length}
    corruption = functools.partial(corrupt, sentinel_ids=tokenizer.sentinel_ids, eos_id=tokenizer.eos_id, **noise)
    batches = functools.partial(
        training_batches,
        [mixture(data.shuffle_block, cfg.seed, number=n, streams=data.streams) for n in range(data.streams)],
        cfg.optim.batch_size,
        functools.partial(corruption, seed=cfg.seed),
        cfg.seed,
        data.num_workers,
    )
    origin = (
        {"corpus": [corpus.digest for corpus in corpora], "weights": weights}
        | {"tokenizer": tokenizer.sha256, "seed": cfg.seed}
        | {f"data.{key}": data[key] for key in ("input_length", "held_out", "streams", "shuffle_block", "on_error")}
        | {"data.mlm_probability or data.mean_noise_span_length": list(noise.values())}
    )
    held_out, size = Reading(), cfg.eval.batch_size
    batches_held_out = batches_in_order(mixture(size, FIXED_SEED, evaluation=True), size, corruption, held_out)
    evaluation = list(itertools.islice(batches_held_out, cfg.eval.steps))
    held_out.counts["sequences"] = sum(len(batch["labels"]) for batch in evaluation)
    if not any(corpus.held_out_files for corpus in corpora):
        held_out.faults = []  # the training streams come across them too
    if not evaluation:
        raise UserError(
            f"data.held_out={data.held_out} leaves fewer than {raw_length} tokens of this corpus "
            f"for evaluation: raise it, or give more documents (in a .txt file, blank lines separate them)"
        )
    in_order = functools.partial(batches_in_order, mixture(1024, FIXED_SEED), 1024, corruption, Reading())
    return Data(corpora, tokenizer, raw_length, target_length, origin, batches, evaluation, held_out, in_order)


def parts_of(data) -> list:
    """The sources of a config's group data, each with the keys that say what it reads; of a mixture also its weight."""
    if data.source != "mixture":
        return [data]
    return [OmegaConf.merge({key: data[key] for key in PART}, part) for part in data.mixture]


def texts(documents: Iterator[Document]) -> Iterator[str]:
    for number, document in enumerate(documents):
        if document.text:
            yield document.text
        elif number == 0 and document.reading.faults:
            raise UserError(f"no document of the corpus can be read: {document.reading.faults[0]}")


def alternating(sources: list[Iterator], weights: list[float]) -> Iterator:
    """What the sources have, drawn as often as their weights say, the turns of one that has no more by the others."""
    weights, n = list(weights), 0
    while any(weights):
        (source,) = draw(weights, FIXED_SEED, np.array([n]))
        item = next(sources[source], None)
        if item is None:
            weights[source] = 0.0
        else:
            yield item
            n += 1


def batches_in_order(
    mixture: Mixture, size: int, corruption: Callable, reading: Reading
) -> Iterator[dict[str, torch.Tensor]]:
    """The text once, in its order and corrupted alike whatever the run's seed; what was read is added to `reading`."""

    def chunks(chunker: Chunker) -> Iterator[np.ndarray]:
        for _, block, more in chunker.epoch(Place()):
            reading.add(more)
            yield from block

    rows = alternating([chunks(chunker) for chunker in mixture.chunkers], mixture.weights)
    for first in itertools.count(0, size):
        group = list(itertools.islice(rows, size))
        if group:
            input_ids, labels = corruption(np.array(group), np.arange(first, first + len(group)), seed=FIXED_SEED)
            yield {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if len(group) < size:
            return


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
