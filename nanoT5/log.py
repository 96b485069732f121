"""What a run tells: log events to metrics.jsonl and to the terminal, the header, the summary."""

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from accelerate.utils import gather_object
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

from nanoT5 import UserError, curve, trackers
from nanoT5.optim import Optimizer, square_sums

SHOWN_FAULTS = 20


@dataclass
class Progress:
    """How far a run has come: all that a checkpoint holds beside weights and optimizer state."""

    step: int = 0
    input_tokens: int = 0
    target_tokens: int = 0
    bad_steps: int = 0  # skipped, because the loss or the gradient was infinite or NaN
    bad_in_a_row: int = 0
    pending: list[list[float]] = field(default_factory=list)  # learning rate, loss, gradient norm since the last event
    faults: list[str] = field(default_factory=list)  # of the text, since the last event; of this process's streams
    data: dict | None = None  # state of the data after the last batch; None at the start

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.target_tokens

    def advance(
        self, batch: dict[str, Tensor], processes: int, faults: list[str], lr: float, loss: float, grad_l2: float
    ) -> None:
        self.step += 1
        self.faults = self.faults + faults
        self.input_tokens += batch["input_ids"].numel() * processes
        self.target_tokens += batch["labels"].numel() * processes
        if math.isfinite(loss + grad_l2):
            self.pending.append([lr, loss, grad_l2])
            self.bad_in_a_row = 0
        else:
            self.bad_steps += 1
            self.bad_in_a_row += 1


class Diverged(Exception):
    """The loss, the gradient or the weights are no longer finite numbers."""


@dataclass
class Log:
    """Log events to metrics.jsonl and to the terminal: a progress bar there, a line each event elsewhere.

    Of several processes only the main one writes and prints.
    """

    folder: Path
    total_steps: int
    progress: Progress
    checkpoint: Path | None  # that the run goes on from; later the last one saved
    is_main_process: bool = True
    track: Callable[[dict, int], None] = lambda numbers, step: None  # tells the trackers
    history: bool = False  # whether there are events from before the checkpoint
    waited: float = 0.0  # seconds for data since the last event
    shown_faults: int = 0
    last_evaluation: dict = field(default_factory=dict)

    def __post_init__(self):
        shown = sys.stderr.isatty() and self.is_main_process
        self.bar = tqdm(total=self.total_steps, initial=self.progress.step, unit="step", disable=not shown)
        self.resumed_at, self.started = self.progress.step, time.perf_counter()
        self.tokens, self.since = self.progress.tokens, self.started  # at the last event
        if self.is_main_process:
            self.begin()

    def begin(self) -> None:
        """Start metrics.jsonl with the events before the checkpoint, as if the run had never stopped."""
        before, events = self.checkpoint and self.checkpoint.parent.parent, []
        if before and (before / "metrics.jsonl").exists():
            events = [event for event in curve.read(before) if event["step"] <= self.progress.step]
        self.history = bool(events)
        aside = self.folder / ".metrics.jsonl"
        aside.write_text("".join(json.dumps(event) + "\n" for event in events))
        aside.replace(self.folder / "metrics.jsonl")

    def training(self, t5: nn.Module, optimizer: Optimizer) -> None:
        """The event of the steps since the last one."""
        weights_l2 = square_sums([p.detach() for p in t5.parameters()]).sum().sqrt().item()
        rates, losses, norms = zip(*self.progress.pending) if self.progress.pending else [(math.nan,)] * 3
        self.progress.pending = []
        if not math.isfinite(weights_l2):
            self.diverged("the weights are infinite or NaN")
        now = time.perf_counter()
        event = {
            "train/loss": sum(losses) / len(losses),
            "train/lr": rates[-1],
            "train/grad_l2": sum(norms) / len(norms),
            "train/weights_l2": weights_l2,
            "train/tokens_per_second": (self.progress.tokens - self.tokens) / (now - self.since),
            "train/data_wait": self.waited / (now - self.since),
            "train/bad_steps": self.progress.bad_steps,
            "train/input_tokens": self.progress.input_tokens,
            "train/target_tokens": self.progress.target_tokens,
        }
        event |= {f"train/{name}": value.item() for name, value in optimizer.diagnostics().items()}
        self.write(event)
        shown = f"loss {event['train/loss']:.3f} | lr {rates[-1]:.1e} | grad {event['train/grad_l2']:.2f}"
        shown += f" | {event['train/tokens_per_second']:,.0f} tokens/s"
        seconds_left = (now - self.started) / (self.progress.step - self.resumed_at)
        seconds_left *= self.total_steps - self.progress.step
        if self.bar.disable:
            self.say(f"{shown} | {duration(seconds_left)} left")
        self.bar.set_postfix_str(shown)
        faults, self.progress.faults = gather_object(self.progress.faults), []
        for fault in faults[: max(0, SHOWN_FAULTS - self.shown_faults)]:
            self.say(fault)
        if faults:
            self.shown_faults += len(faults)
            self.write({"data/faults": faults})
        self.tokens, self.since, self.waited = self.progress.tokens, now, 0.0

    def evaluation(self, event: dict) -> None:
        self.last_evaluation = event
        self.write(event)
        shown = f"held-out loss {event['eval/loss']:.3f}, accuracy {event['eval/accuracy']:.3f}"
        for heads in curve.alignment([{"step": self.progress.step} | event])[1]:
            shown += f", alignment {heads.mean():+.2f} over chance"
        self.say(shown)
        self.since = time.perf_counter()  # tokens/s is that of training

    @contextmanager
    def waiting(self):
        """Around what waits for data."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def saved(self, path: Path) -> None:
        self.checkpoint = path
        self.since = time.perf_counter()  # as after an evaluation

    def step(self, optim: DictConfig) -> None:
        """What has to be said after a step; optim: the config's group."""
        self.bar.update()
        if bad := self.progress.bad_in_a_row:
            self.say("loss or gradient is infinite or NaN: step skipped")
            if bad >= optim.max_bad_steps:
                end = self.progress.data["samples"]
                samples = f"samples {end - optim.batch_size} to {end - 1}"
                self.diverged(f"{bad} steps in a row, the last one on {samples}, were skipped")

    def diverged(self, what: str) -> None:
        raise Diverged(
            f"step {self.progress.step}: {what}; lower optim.base_lr; "
            f"last good checkpoint: {self.checkpoint or 'none was saved yet'}"
        )

    def close(self) -> None:
        self.bar.close()

    def write(self, event: dict) -> None:
        if not self.is_main_process:
            return
        with (self.folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": self.progress.step} | event) + "\n")
        self.track(trackers.numbers(event), self.progress.step)

    def say(self, text: str) -> None:
        if not self.is_main_process:
            return
        tqdm.write(f"step {self.progress.step:,}/{self.total_steps:,} | {text}")
        sys.stdout.flush()


def taken(folder: Path) -> UserError:
    return UserError(f"hydra.run.dir={folder} already holds a run: name another folder")


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def print_header(rows: dict[str, str]) -> None:
    print("\n".join(f"{name:<10} {text}" for name, text in rows.items()), flush=True)


def write_config(file: TextIO, cfg: DictConfig) -> None:
    file.truncate(0)
    file.write(OmegaConf.to_yaml(cfg, resolve=True))
    file.flush()


def write_summary(folder: Path, summary: dict) -> None:
    aside = folder / "summary.json.writing"
    aside.write_text(json.dumps(summary, indent=1) + "\n")
    aside.replace(folder / "summary.json")
    print(f"held-out loss {summary['eval/loss']:.4f}, accuracy {summary['eval/accuracy']:.4f}: see {folder}")
