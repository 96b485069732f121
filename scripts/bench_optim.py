"""What an optimizer's step costs: python scripts/bench_optim.py [model=nano] [key=value ...]

For each optimizer, on random gradients: RMS scaling against none, and a loop over single tensors against all at once.
The variants take turns, so that a noisy machine does not decide; the ratios are of medians.
"""

import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoT5 import config, main, model, optim, script  # noqa: E402

ROUNDS, STEPS = 9, 3  # turns of each variant, steps a turn


def seconds(optimizer: optim.Optimizer, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS


def bench(overrides: list[str]) -> None:
    cfg, _ = config.load(overrides)
    config.check(cfg)
    device = main.set_up(cfg).device
    shape = {name: cfg.model[name] for name in main.SHAPE}
    params = list(model.T5(model.t5_config(cfg.data.vocab_size + 100, 0, 1, **shape)).to(device).parameters())
    for p in params:
        p.grad = torch.randn_like(p)
    print(f"{sum(p.numel() for p in params):,} parameters in {len(params)} tensors, on {device}")
    print(f"{'':10} {'ms a step':>10} {'RMS scaling':>12} {'single loop':>12}")
    for name in ("adamw", "lion", "sophia", "adafactor"):
        klass = optim.OPTIMIZERS[name]
        variants = {
            "plain": klass(params, rms_scale=False),
            "scaled": klass(params, rms_scale=True),
            "loop": klass([{"params": [p]} for p in params], rms_scale=False),
        }
        times = {variant: [] for variant in variants}
        for _ in range(ROUNDS + 1):
            for variant, optimizer in variants.items():
                times[variant].append(seconds(optimizer, device))
        plain, scaled, loop = (median(values[1:]) for values in times.values())  # the first round warms up
        print(f"{name:10} {plain * 1e3:10.2f} {scaled / plain:11.2f}x {loop / plain:11.2f}x")


if __name__ == "__main__":
    script(lambda: bench(sys.argv[1:]))
