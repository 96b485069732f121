"""How fast a training step is, against Transformers' T5 trained as in 2023.

    python scripts/bench.py                                     # nano, small and base, on a GPU if there is one
    python scripts/bench.py --models base --json bench.json     # one of them; all figures as JSON

Three ways to train on the same work, data and logging included:

- Transformers' T5, with its eager attention and with SDPA, trained as the 2023 nanoT5 does: a collator that corrupts
  one sequence after the other, a loop over parameters for AdamWScale, numbers fetched from the device as they come up;
- this trainer without its levers, and with each of them alone;
- this trainer as model.compile=auto and precision=auto make it for a long run.

Before anything is timed the first batch's loss and gradient are compared with those of the plain path. The variants
take turns in one process, so that a noisy machine does not decide; what is printed are medians and their ratios.
Use is the step's floating-point operations, as flops() counts them, over what matrix products alone reach in the same
process in the same precision.
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import math
import platform
import time
from pathlib import Path
from statistics import median
from unittest import mock

import bench_data
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoT5 import config, data, log, main, model, optim, script, step

# What a model is timed at: overrides, sequences a step on a CPU and on a GPU, in how many rounds
WORK = {
    "nano": ([], 128, 128, 20),
    "small": (["model=small", "data.input_length=512"], 1, 128, 10),
    "base": (["model=base", "data.input_length=512"], 1, 128, 5),
}
OLD = "Transformers, eager, as in 2023"  # what the ratios are to
VOCABULARY = 32_100  # of small and base, T5's; nano has that of its tokenizer
TURN = 2  # steps of a variant in a round, of which the first warms up
MATMUL = {"cpu": 2048, "cuda": 8192}  # size of the square matrices whose product is the limit


def bench(name: str) -> dict:
    """The figures of one model: each variant's, and where the time goes in three of them."""
    overrides, on_cpu, on_gpu, rounds = WORK[name]
    cfg, _ = config.load([*overrides, "optim.total_steps=100000"])
    accelerator = main.set_up(cfg)
    device = accelerator.device
    cfg.optim.batch_size = on_gpu if device.type == "cuda" else on_cpu
    cfg.optim.grad_acc = 2 if name == "base" and device.type == "cuda" else 1  # as the 2023 nanoT5, which has to
    config.check(cfg)
    text = data.build(cfg)
    shape = main.model_shape(cfg, text.tokenizer)
    if name != "nano":
        shape = model.t5_config(VOCABULARY, 0, 1, **{key: cfg.model[key] for key in main.SHAPE})
    precision = main.choose_precision(cfg, device)
    ours, theirs = Ours(cfg, shape, text, accelerator, precision), In2023(cfg, shape, text, accelerator)
    theirs.t5.load_state_dict(ours.t5.state_dict())

    variants = {
        OLD: (theirs, [functools.partial(theirs.attention, "eager")]),
        "Transformers, SDPA, as in 2023": (theirs, [functools.partial(theirs.attention, "sdpa")]),
        "plain": (ours, list(ours.off.values())),
        **{
            f"plain + {lever}": (ours, [off for other, off in ours.off.items() if other != lever]) for lever in ours.off
        },
        "auto": (ours, []),
    }
    if precision == "fp32":
        variants["auto, but bf16"] = (ours, [functools.partial(ours.computing_in, "bf16")])
    print(f"\n{name}: {cfg.optim.batch_size} x ({cfg.data.input_length} + {text.target_length}), {ours.describe()}")
    work = flops(shape, cfg.optim.batch_size, cfg.data.input_length, text.target_length)
    tokens = cfg.optim.batch_size * (cfg.data.input_length + text.target_length)
    figures, limits = measure(variants, work, tokens, rounds, device)
    show(figures)
    reached = ", ".join(f"{rate:.3g} a second in {precision}" for precision, rate in limits.items())
    print(f"{work:.3g} floating-point operations a step; matrix products alone reach {reached}")
    parts = {variant: parts_of(*variants[variant], device, rounds) for variant in (OLD, "plain", "auto")}
    print(f"{'ms':33} " + " ".join(f"{part:>10}" for part in parts["auto"]))
    for variant, took in parts.items():
        print(f"{variant:33} " + " ".join(f"{value * 1e3:10.2f}" for value in took.values()))
    return {"sequences": cfg.optim.batch_size, "flops": work, "matmul": limits, "variants": figures, "parts": parts}


def measure(variants: dict, work: float, tokens: int, rounds: int, device: torch.device) -> tuple[dict, dict]:
    """(each variant's figures; operations a second of matrix products alone, in both precisions)."""
    differences = compare(variants)
    times, peaks, precisions = {variant: [] for variant in variants}, dict.fromkeys(variants, 0), {}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    rates = {precision: [] for precision in dtypes}
    for _ in range(rounds):
        for variant, (trainer, contexts) in variants.items():
            with together(contexts):
                forget_peak(device)
                times[variant] += [seconds(trainer.once, device) for _ in range(TURN)][1:]
                peaks[variant] = max(peaks[variant], peak(device))
                precisions[variant] = trainer.precision
        for precision, dtype in dtypes.items():
            rates[precision].append(matmul_rate(device, dtype))
    limits = {precision: median(values) for precision, values in rates.items()}
    figures = {
        variant: {
            "seconds": median(times[variant]),
            "tokens/s": tokens / median(times[variant]),
            "ratio": median(times[OLD]) / median(times[variant]),
            "utilization": work / median(times[variant]) / limits[precisions[variant]],
            "peak_bytes": peaks[variant],
            "precision": precisions[variant],
            "differences": differences[variant],
        }
        for variant in variants
    }
    return figures, limits


def show(figures: dict) -> None:
    print(f"{'':33} {'ms':>8} {'tokens/s':>9} {'ratio':>6} {'use':>5} {'peak MB':>8} {'loss, gradient off by':>22}")
    for variant, measured in figures.items():
        loss, gradient = measured["differences"]
        print(
            f"{variant:33} {measured['seconds'] * 1e3:8.1f} {measured['tokens/s']:9,.0f} {measured['ratio']:5.2f}x "
            f"{measured['utilization']:5.0%} {measured['peak_bytes'] / 2**20:8,.0f} {loss:11.1e} {gradient:10.1e}"
        )


def flops(shape: transformers.T5Config, sequences: int, inputs: int, targets: int) -> float:
    """Floating-point operations of a step's matrix products, two for each multiplication, three passes in all."""
    inner = shape.num_heads * shape.d_kv
    projection, feed_forward = shape.d_model * inner, 3 * shape.d_model * shape.d_ff
    encoder = shape.num_layers * (inputs * (4 * projection + feed_forward) + 2 * inputs**2 * inner)
    decoder = shape.num_decoder_layers * (
        targets * (6 * projection + feed_forward)  # self-attention, queries and output of cross-attention
        + inputs * 2 * projection  # its keys and values
        + 2 * targets * (targets + inputs) * inner
    )
    head = targets * shape.d_model * shape.vocab_size
    return 3 * 2 * sequences * (encoder + decoder + head)


# ---------------------------------------------------------------------------------------------------------------------
# What is compared


class Ours:
    """This trainer, and what switches each of its levers off."""

    def __init__(self, cfg, shape, text: data.Data, accelerator, precision: str):
        self.cfg, self.device = cfg, accelerator.device
        self.t5 = main.build_model(cfg, shape, accelerator)
        self.step = step.Step(self.t5, optim.build(cfg.optim, self.t5), accelerator, precision, cfg.optim, cfg.seed)
        self.batches = text.batches()
        self.progress = log.Progress()
        self.events = log.Log(Path(), cfg.optim.total_steps, self.progress, None, is_main_process=False)
        self.rate = self.step.optimizer.defaults["lr"] / 100  # so small that the model stays what it is
        loop = LoopAdamWScale(self.t5.parameters(), self.rate)
        self.off = {
            "SDPA": functools.partial(sdpa_kernel, SDPBackend.MATH),
            "loss by rows": functools.partial(mock.patch.object, model.HeadLoss, "apply", whole_loss),
            "optimizer": functools.partial(mock.patch.object, self.step, "optimizer", loop),
        }
        if main.compiling_pays(cfg, self.device):
            self.off["compiled blocks"] = functools.partial(torch.compiler.set_stance, "force_eager")
        if self.device.type == "cpu" and platform.libc_ver()[0] == "glibc":
            self.off["memory kept"] = giving_memory_back
        if precision == "bf16":
            self.off["bf16"] = functools.partial(self.computing_in, "fp32")

    def describe(self) -> str:
        threads = torch.cuda.get_device_name() if self.device.type == "cuda" else f"{torch.get_num_threads()} threads"
        return f"{sum(p.numel() for p in self.t5.parameters()):,} parameters, {self.device.type}, {threads}"

    @property
    def precision(self) -> str:
        return self.step.precision

    def computing_in(self, precision: str):
        return mock.patch.object(self.step, "precision", precision)

    def next_batch(self) -> step.Batch:
        with self.events.waiting():
            batch, self.progress.data, self.faults = next(self.batches)
        return batch

    def once(self) -> None:
        batch = self.next_batch()
        loss, grad_l2 = self.step(batch, self.rate, self.progress.step)
        self.progress.advance(batch, 1, self.faults, self.rate, loss, grad_l2)
        self.log()

    def log(self) -> None:
        self.events.step(self.cfg.optim)
        if self.progress.step % self.cfg.logging.every_steps == 0:
            self.events.training(self.t5, self.step.optimizer)

    def loss(self, batch: step.Batch) -> torch.Tensor:
        batch = {key: column.to(self.device) for key, column in batch.items()}
        with step.autocast(self.step.precision, self.device):
            return self.t5(**batch).loss

    def optimize(self) -> None:
        self.step.clip(self.cfg.optim.grad_clip)
        self.step.optimizer.step()


class In2023:
    """Transformers' T5 in a loop with the steps of the 2023 nanoT5's, written anew; fp32 on a CPU, bf16 on a GPU."""

    def __init__(self, cfg, shape, text: data.Data, accelerator):
        self.cfg, self.device = cfg, accelerator.device
        self.t5 = model.hf_t5(shape).to(self.device)
        self.precision = "bf16" if self.device.type == "cuda" else "fp32"
        self.optimizer = LoopAdamWScale(self.t5.parameters(), 1e-4)
        self.collator = bench_data.Collator2023(text)
        # as its chunks lie in a data set on disk: lists of numbers
        chunks = np.random.default_rng(0).integers(text.tokenizer.size, size=(256, text.raw_length))
        self.chunks = itertools.cycle(chunks.tolist())
        self.steps = 0

    @contextlib.contextmanager
    def attention(self, kind: str):
        for shape in {id(m.config): m.config for m in self.t5.modules() if hasattr(m, "config")}.values():
            shape._attn_implementation = kind
        yield

    def next_batch(self) -> step.Batch:
        return self.collator.batch(list(itertools.islice(self.chunks, self.cfg.optim.batch_size)))

    def loss(self, batch: step.Batch) -> torch.Tensor:
        batch = {key: column.to(self.device) for key, column in batch.items()}
        with step.autocast(self.precision, self.device):
            return self.t5(**batch).loss

    def optimize(self) -> None:
        nn.utils.clip_grad_norm_(self.t5.parameters(), self.cfg.optim.grad_clip).item()
        self.optimizer.step()

    def once(self) -> None:
        batch, micros = self.next_batch(), self.cfg.optim.grad_acc
        for columns in zip(*(column.chunk(micros) for column in batch.values())):
            loss = self.loss(dict(zip(batch, columns))) / micros
            loss.backward()
            loss.item()
        self.optimize()
        self.t5.zero_grad()
        self.steps += 1
        self.log()

    def log(self) -> None:
        if self.steps % self.cfg.logging.every_steps == 0:
            sum(p.detach().norm(2).item() ** 2 for p in self.t5.parameters())


class LoopAdamWScale:
    """AdamW with RMS scaling, one parameter and one operation after the other, as in 2023."""

    param_groups, defaults = [], {}

    def __init__(self, params, lr: float):
        self.params, self.lr, self.state, self.steps = list(params), lr, {}, 0

    def curvature_is_due(self) -> bool:
        return False

    def diagnostics(self) -> dict:
        return {}

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for p in self.params:
            if p not in self.state:
                self.state[p] = torch.zeros_like(p), torch.zeros_like(p)
            mean, square = self.state[p]
            mean.mul_(0.9).add_(p.grad, alpha=0.1)
            square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            denominator = square.sqrt().add_(1e-6)
            rate = self.lr * math.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
            rate *= max(1e-3, (p.norm(2) / math.sqrt(p.numel())).item())
            p.addcdiv_(mean, denominator, value=-rate)


def whole_loss(hidden, head, labels, draws) -> torch.Tensor:
    return model.cross_entropy(F.linear(hidden, head), labels)


@contextlib.contextmanager
def giving_memory_back():
    """What glibc does by itself: its thresholds, which have become fixed, are those that they grow to."""
    libc, trim_threshold, mmap_threshold, mmap_max = ctypes.CDLL(None), -1, -3, -4
    libc.mallopt(mmap_threshold, 32 * 2**20)
    libc.mallopt(trim_threshold, 64 * 2**20)
    libc.mallopt(mmap_max, 65536)
    yield
    main.keep_freed_memory()


# ---------------------------------------------------------------------------------------------------------------------
# Comparing and timing


@contextlib.contextmanager
def together(contexts: list):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def compare(variants: dict) -> dict[str, tuple[float, float]]:
    """Largest difference of loss and of gradient from the plain path's on one batch, relative to the largest value."""
    batch = variants["plain"][0].next_batch()
    results = {}
    for variant, (trainer, contexts) in variants.items():
        with together(contexts):
            trainer.t5.train()
            trainer.t5.zero_grad()
            loss = trainer.loss(batch)
            loss.backward()
        results[variant] = loss.item(), {name: p.grad.float().cpu() for name, p in trainer.t5.named_parameters()}
        trainer.t5.zero_grad()
    expected, gradients = results["plain"]
    largest = max(g.abs().max() for g in gradients.values())
    return {
        variant: (
            abs(loss - expected) / expected,
            max(((g - gradients[name]).abs().max() / largest).item() for name, g in grads.items()),
        )
        for variant, (loss, grads) in results.items()
    }


def parts_of(trainer, contexts: list, device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of each part of a step; forward and backward of the first micro batch, times their number."""
    micros = trainer.cfg.optim.grad_acc
    parts = {"data": 1, "forward": micros, "backward": micros, "optimizer": 1, "logging": 1}
    times = []
    with together(contexts):
        for _ in range(rounds):
            marks = [now(device)]
            batch = trainer.next_batch()
            marks.append(now(device))
            loss = trainer.loss({key: column.chunk(micros)[0] for key, column in batch.items()})
            marks.append(now(device))
            loss.backward()
            marks.append(now(device))
            trainer.optimize()
            marks.append(now(device))
            trainer.log()
            marks.append(now(device))
            trainer.t5.zero_grad()
            times.append(np.diff(marks))
    return {part: float(took) * count for (part, count), took in zip(parts.items(), np.median(times, axis=0))}


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function, device: torch.device) -> float:
    started = now(device)
    function()
    return now(device) - started


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second that the product of two large square matrices reaches."""
    size = MATMUL[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: a @ b, device) for _ in range(4))


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size begins anew


def peak(device: torch.device) -> int:
    """Bytes of memory used at most since forget_peak(): of the GPU, or of this process with all models in it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=WORK, default=list(WORK), metavar="NAME", help="nano small base")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = {
        "machine": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "models": {name: bench(name) for name in arguments.models},
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    script(command_line)
