"""One step of training, one evaluation: what every process does with its share of a batch."""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate import Accelerator
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nanoT5 import model, optim
from nanoT5.alignment import Alignment
from nanoT5.sharding import whole

Batch = dict[str, Tensor]


def autocast(precision: str, device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@dataclass
class Step:
    """One step of the optimizer; calling it trains on a batch, of which each process has its share."""

    trained: nn.Module  # t5, or what wraps it
    optimizer: optim.Optimizer
    accelerator: Accelerator
    precision: str
    cfg: DictConfig  # the group optim
    seed: int

    def __call__(self, batch: Batch, lr: float, number: int) -> tuple[float, float]:
        """(mean loss per target token over all processes, L2 norm of the gradient before clipping).

        Where either is not finite nothing is updated.
        """
        rank = self.accelerator.process_index
        torch.manual_seed((self.seed << 32) + (rank << 24) + number)  # of dropout: the same in a run that was resumed
        if self.optimizer.curvature_is_due():
            self.gradients(batch | {"draws": self.draws(batch["labels"], number)})
            if math.isfinite(self.clip(math.inf).item()):
                self.optimizer.update_curvature(int(self.targets(batch["labels"])))
            self.optimizer.zero_grad()
        loss, grad_l2 = self.accelerator.reduce(self.gradients(batch)), self.clip(self.cfg.grad_clip or math.inf)
        loss, grad_l2 = torch.stack([loss, grad_l2]).tolist()  # the step's one wait for a GPU
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(loss + grad_l2):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, grad_l2

    def clip(self, limit: float) -> Tensor:
        """Scale the gradient down to this L2 norm if it is longer; returns the norm before."""
        return whole(nn.utils.clip_grad_norm_(self.trained.parameters(), limit))

    def gradients(self, batch: Batch) -> Tensor:
        """Accumulate the gradient of the batch's mean loss per target token; returns this process's part of that loss.

        With draws (B, T) in the batch, the loss is against labels drawn from the model's own predictions.
        """
        self.trained.train()
        targets = self.targets(batch["labels"])
        total = torch.zeros((), device=self.accelerator.device)
        micros = range(self.cfg.grad_acc)
        for i, *columns in zip(micros, *(column.chunk(self.cfg.grad_acc) for column in batch.values())):
            micro = {n: column.to(self.accelerator.device, non_blocking=True) for n, column in zip(batch, columns)}
            share = (micro["labels"] != model.IGNORED).sum() / targets
            if isinstance(self.trained, FSDPModule):
                self.trained.set_requires_gradient_sync(i == micros[-1])
            with self.accelerator.no_sync(self.trained) if i < micros[-1] else nullcontext():
                with autocast(self.precision, self.accelerator.device):
                    loss = self.trained(**micro).loss * share
                # times the number of processes, over which gradients are averaged and not summed
                (loss * self.accelerator.num_processes).backward()
            total += loss.detach()
        return total

    def targets(self, labels: Tensor) -> Tensor:
        """How many labels of all processes' batches are not IGNORED, on the device."""
        return self.accelerator.reduce((labels != model.IGNORED).sum().to(self.accelerator.device))

    def draws(self, labels: Tensor, number: int) -> Tensor:
        """Numbers in [0, 1) for this process's labels (B, T), the same however many processes share the batch."""
        generator = torch.Generator().manual_seed((self.seed << 32) + number)
        processes = self.accelerator.num_processes
        rows = torch.rand(processes * len(labels), labels.shape[1], generator=generator)
        return rows[self.accelerator.process_index :: processes]

    def rehearse(self, batch: Batch) -> float:
        """Seconds that a step will take, from gradients that are thrown away; what cannot run fails here."""
        for _ in range(2):  # the first time warms up, and compiles
            started = time.perf_counter()
            self.gradients(batch).item()
            self.optimizer.zero_grad()
        return time.perf_counter() - started


@dataclass
class Evaluator:
    """Loss in nats per target token, accuracy and cross-attention's alignment on the held-out batches."""

    t5: nn.Module
    batches: list[Batch]
    sentinel_ids: np.ndarray
    precision: str
    accelerator: Accelerator

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # compiled code would not call the hooks that watch attention
    def __call__(self) -> dict:
        self.t5.eval()
        device = self.accelerator.device
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct targets, targets
        with Alignment(self.t5, torch.as_tensor(self.sentinel_ids, device=device)) as alignment:
            for first in range(0, len(self.batches), processes):
                # every process has to take part in every forward pass under FSDP, if only with the last batch again
                batch = self.batches[min(first + rank, len(self.batches) - 1)]
                batch = {name: column.to(device, non_blocking=True) for name, column in batch.items()}
                with autocast(self.precision, device):
                    output = self.t5(**batch)
                if first + rank < len(self.batches):
                    labels = batch["labels"]
                    valid = labels != model.IGNORED
                    correct = (output.logits.argmax(-1) == labels) & valid
                    sums += torch.stack([output.loss * valid.sum(), correct.sum(), valid.sum()])
                    alignment.add(**batch)
        loss, correct, targets = self.accelerator.reduce(sums).tolist()
        shares = alignment.result(self.accelerator.reduce)
        return {"eval/loss": loss / targets, "eval/accuracy": correct / targets} | shares

    def rehearse(self) -> None:
        """Evaluate one batch, so that evaluation cannot fail after a day of training."""
        replace(self, batches=self.batches[:1])()
