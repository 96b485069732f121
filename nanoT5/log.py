"""What a run tells: log events to metrics.jsonl and to the terminal, the header, the summary."""

import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanoT5 import UserError, curve
from nanoT5.optim import Optimizer


@dataclass
class Progress:
    """How far a run has come: all that a checkpoint holds beside weights and optimizer state."""

    step: int = 0
    input_tokens: int = 0
    target_tokens: int = 0
    data: dict | None = None  # state of the data after the last batch; None at the start

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.target_tokens

    def advance(self, batch: dict[str, Tensor]) -> None:
        self.step += 1
        self.input_tokens += batch["input_ids"].numel()
        self.target_tokens += batch["labels"].numel()


class Diverged(Exception):
    """The loss, the gradient or the weights are no longer finite numbers."""


@dataclass
class Log:
    """Log events to metrics.jsonl and to the terminal: a progress bar there, a line each event elsewhere."""

    folder: Path
    total_steps: int
    progress: Progress
    # of each step since the last event: learning rate, and loss and gradient norm on the device
    pending: list[tuple[float, Tensor]] = field(default_factory=list)
    last_evaluation: dict = field(default_factory=dict)
    last_checkpoint: Path | None = None

    def __post_init__(self):
        on_terminal = sys.stderr.isatty()
        self.bar = tqdm(total=self.total_steps, initial=self.progress.step, unit="step", disable=not on_terminal)
        self.resumed_at, self.started = self.progress.step, time.perf_counter()
        self.tokens, self.since = self.progress.tokens, self.started  # at the last event
        try:
            (self.folder / "metrics.jsonl").touch(exist_ok=False)
        except FileExistsError:
            raise taken(self.folder) from None

    def add(self, lr: float, loss: Tensor, grad_l2: Tensor) -> None:
        self.pending.append((lr, torch.stack([loss, grad_l2])))
        self.bar.update()

    def training(self, t5: nn.Module, optimizer: Optimizer) -> None:
        """The event of the steps since the last one; the one place where training waits for the device."""
        rates, results = zip(*self.pending)
        losses, norms = torch.stack(results).cpu().double().unbind(1)
        weights_l2 = torch.stack(torch._foreach_norm([p.detach() for p in t5.parameters()])).norm().item()
        finite = losses.isfinite() & norms.isfinite()
        finite[-1] &= math.isfinite(weights_l2)
        if not finite.all():
            bad = finite.int().argmin().item()
            step = self.progress.step - len(losses) + 1 + bad
            raise Diverged(
                f"loss, gradient or weights became infinite or NaN at step {step}, learning rate {rates[bad]:.2e}: "
                f"lower optim.base_lr; last good checkpoint: {self.last_checkpoint or 'none was saved yet'}"
            )
        now = time.perf_counter()
        event = {
            "train/loss": losses.mean().item(),
            "train/lr": rates[-1],
            "train/grad_l2": norms.mean().item(),
            "train/weights_l2": weights_l2,
            "train/tokens_per_second": (self.progress.tokens - self.tokens) / (now - self.since),
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
        self.pending.clear()
        self.tokens, self.since = self.progress.tokens, now

    def evaluation(self, event: dict) -> None:
        self.last_evaluation = event
        self.write(event)
        shown = f"held-out loss {event['eval/loss']:.3f}, accuracy {event['eval/accuracy']:.3f}"
        for heads in curve.alignment([{"step": self.progress.step} | event])[1]:
            shown += f", alignment {heads.mean():+.2f} over chance"
        self.say(shown)
        self.since = time.perf_counter()  # tokens/s is that of training

    def close(self) -> None:
        self.bar.close()

    def write(self, event: dict) -> None:
        with (self.folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": self.progress.step} | event) + "\n")

    def say(self, text: str) -> None:
        tqdm.write(f"step {self.progress.step:,}/{self.total_steps:,} | {text}")
        sys.stdout.flush()


def taken(folder: Path) -> UserError:
    """Found when a run begins, before it writes anything, or at its first event where two began in the same second."""
    return UserError(f"hydra.run.dir={folder} already holds a run: name another folder")


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def print_header(rows: dict[str, str]) -> None:
    print("\n".join(f"{name:<10} {text}" for name, text in rows.items()), flush=True)


def write_summary(folder: Path, summary: dict) -> dict:
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"held-out loss {summary['eval/loss']:.4f}, accuracy {summary['eval/accuracy']:.4f}: see {folder}")
    return summary
