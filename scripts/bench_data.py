"""How fast text becomes batches: python scripts/bench_data.py [--documents N] [key=value ...]

1. Batches are prepared, in one process, that many times faster than the model consumes them.
2. At T5's lengths (512 inputs, 114 targets) that is so many tokens of text a second on one core, against the way of the
   2023 nanoT5: Transformers' tokenizer in datasets.map over 1,000 documents at a time, then a collator that corrupts
   one sequence after the other in numpy. Both read the same .jsonl file with the same tokenizer; what the tokenizer
   alone does in a second is the limit.
3. The first batch of a data set with as many files as C4, on a Hugging Face Hub of this machine's own.
4. With --documents: the memory that reading so many takes.

What is compared takes turns in one process, so that a noisy machine does not decide; the ratios are of medians.
"""

import argparse
import gzip
import itertools
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoT5 import config, corruption, data, main, script  # noqa: E402
from tests import hub  # noqa: E402

ROUNDS, BATCHES = 15, 20  # turns of each, batches prepared a turn
DOCUMENTS = 4000  # of the corpus, in the second part
FILES = 1024  # of C4


def seconds(function, *arguments) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def against_the_model(cfg) -> data.Data:
    accelerator = main.set_up(cfg)
    text = data.build(cfg)
    t5 = main.build_model(cfg, main.model_shape(cfg, text.tokenizer), accelerator)
    precision = main.choose_precision(cfg, accelerator.device)
    step = main.Step(t5, None, accelerator, precision, cfg.optim, seed=0)
    batches = text.batches()
    batch, *_ = next(batches)
    step.gradients(batch).item()  # warm up
    preparing, consuming = [], []
    for _ in range(ROUNDS):
        preparing.append(seconds(list, itertools.islice(batches, BATCHES)) / BATCHES)
        consuming.append(seconds(lambda: step.gradients(batch).item()))
        t5.zero_grad()
    prepared, consumed = median(preparing), median(consuming)
    print(f"a batch: {prepared * 1e3:.2f} ms, its forward and backward pass: {consumed * 1e3:.1f} ms")
    print(f"ratio: {consumed / prepared:.0f}")
    return text


def against_2023(text: data.Data, folder: Path) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    lines = list(itertools.islice(open(text.corpora[0].files[0]), DOCUMENTS))
    (folder / "text.jsonl").write_text("".join(lines))
    text.tokenizer.save(folder / "tokenizer")
    options = [f"data.path={folder}/text.jsonl", f"data.tokenizer={folder}/tokenizer", "data.shuffle_block=64"]
    cfg = config.load(["data=text", "data.input_length=512", *options])[0]
    text, texts = data.build(cfg), [json.loads(line)["text"] for line in lines]
    old = Pipeline2023(folder, text)
    ours, theirs, limit = [], [], []
    for _ in range(3):
        batches = text.batches()
        ours.append(
            cfg.optim.batch_size * text.raw_length * BATCHES / seconds(list, itertools.islice(batches, BATCHES))
        )
        theirs.append(old.tokens_a_second())
        limit.append(sum(map(len, text.tokenizer.encode(texts))) / seconds(text.tokenizer.encode, texts))
    ours, theirs, limit = map(median, (ours, theirs, limit))
    print(f"text to batches of {cfg.optim.batch_size} x ({cfg.data.input_length} + {text.target_length}), one core:")
    print(
        f"{ours:,.0f} tokens/s, as in 2023 {theirs:,.0f}, ratio {ours / theirs:.1f}; the tokenizer alone {limit:,.0f}"
    )


def from_a_hub(folder: Path) -> None:
    lines = list(itertools.islice(open(folder / "text.jsonl"), 500))
    content = gzip.compress("".join(lines).encode())
    hub.write_c4(folder, train=[content] * FILES, validation=[content])
    with hub.serving(folder) as (address, _):
        os.environ |= {"HF_ENDPOINT": address, "HF_HOME": str(folder)}  # which libraries read when they are loaded
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            took = pool.apply(
                first_batch, [["task=hump_c4", f"data.tokenizer={folder}/tokenizer", "data.num_workers=0"]]
            )
    print(f"first batch of {FILES:,} files on a Hub of this machine: {took:.1f} s")


def first_batch(overrides: list[str]) -> float:
    """Seconds until there is one, held-out batches included."""
    return seconds(lambda: next(data.build(config.load(overrides)[0]).batches()))


def memory(folder: Path, documents: int) -> None:
    with (folder / "many.jsonl").open("w") as file:
        file.writelines(f'{{"text": "This is document {i} of many, which are all short."}}\n' for i in range(documents))
    options = [f"data.path={folder}/many.jsonl", f"data.tokenizer={folder}/tokenizer", "optim.batch_size=1024"]
    batches = data.build(config.load(["data=text", *options])[0]).batches()
    for share in (0.1, 1.0):
        # one in fifty is held out
        state = next(state for _, state, _ in batches if state["counts"]["documents"] >= 0.95 * share * documents)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"{state['counts']['documents']:,} documents read: {peak} MB at most")


class Pipeline2023:
    """The steps of the 2023 nanoT5's pipeline, written anew."""

    def __init__(self, folder: Path, text: data.Data):
        import datasets
        from transformers import AutoTokenizer

        datasets.disable_progress_bars()
        datasets.disable_caching()
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.tokenizer.model_max_length = int(1e30)
        self.rows = datasets.load_dataset(
            "json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=folder
        )
        self.raw_length, self.collator = text.raw_length, Collator2023(text)

    def tokens_a_second(self) -> float:
        started = time.perf_counter()
        chunked = self.rows.map(self.chunks, batched=True, batch_size=1000, remove_columns=self.rows.column_names)
        for first in range(0, len(chunked), 128):
            self.collator.batch(chunked[first : first + 128]["input_ids"])
        return len(chunked) * self.raw_length / (time.perf_counter() - started)

    def chunks(self, rows: dict) -> dict:
        ids = list(itertools.chain(*self.tokenizer(rows["text"], return_attention_mask=False)["input_ids"]))
        end = len(ids) // self.raw_length * self.raw_length
        return {"input_ids": [ids[i : i + self.raw_length] for i in range(0, end, self.raw_length)]}


class Collator2023:
    """The collator of the 2023 nanoT5, written anew: one sequence after the other, in numpy."""

    def __init__(self, text: data.Data):
        self.text, self.rng = text, np.random.default_rng(0)

    def batch(self, chunks: list[list[int]]) -> dict[str, torch.Tensor]:
        chunks = np.array(chunks)
        masks = [self.noise_mask() for _ in chunks]
        columns = {
            "input_ids": [self.corrupt(ids, mask) for ids, mask in zip(chunks, masks)],
            "labels": [self.corrupt(ids, ~mask) for ids, mask in zip(chunks, masks)],
        }
        return {name: torch.from_numpy(np.stack(rows)) for name, rows in columns.items()}

    def noise_mask(self) -> np.ndarray:
        """(R,) of which spans are noise, drawn for one sequence."""
        noise, spans = corruption.span_counts(self.text.raw_length, 0.15, 3.0)
        lengths = []
        for items in (self.text.raw_length - noise, noise):
            cuts = np.sort(self.rng.permutation(items - 1)[: spans - 1]) + 1
            lengths.append(np.diff(cuts, prepend=0, append=items))
        starts = np.zeros(self.text.raw_length, dtype=np.int8)
        starts[np.cumsum(np.stack(lengths, axis=1).reshape(-1))[:-1]] = 1
        return np.cumsum(starts) % 2 == 1

    def corrupt(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        first = mask & ~np.roll(mask, 1)
        sentinels = self.text.tokenizer.sentinel_ids[np.cumsum(first) - 1]
        kept = np.where(first, sentinels, ids)[first | ~mask]
        return np.append(kept, self.text.tokenizer.eos_id)


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of nanoT5.main, for the first part")
    parser.add_argument("--documents", type=int, metavar="N", help="measure the memory that reading so many takes")
    arguments = parser.parse_intermixed_args()
    given = config.load(arguments.overrides)[0]
    config.check(given)
    corpus = against_the_model(given)
    with tempfile.TemporaryDirectory() as work:
        against_2023(corpus, Path(work))
        from_a_hub(Path(work))
        if arguments.documents:
            memory(Path(work), arguments.documents)


if __name__ == "__main__":
    script(command_line)
