"""How many times faster batches are prepared than the model consumes them: python scripts/bench_data.py [key=value ...]

Data and model take turns in one process, so that a noisy machine does not decide; the medians are compared.
"""

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoT5 import config, data, main  # noqa: E402

ROUNDS, BATCHES = 15, 20  # turns of each, batches prepared a turn


def bench(overrides: list[str]) -> None:
    cfg, _ = config.load(overrides)
    config.check(cfg)
    accelerator = main.set_up(cfg)
    text = data.build(cfg)
    shape = main.model_shape(cfg, text.tokenizer)
    t5 = main.build_model(cfg, shape, accelerator)
    step = main.Step(t5, None, accelerator, main.choose_precision(cfg, accelerator.device), cfg.optim, 0)
    batches = text.batches(None)
    batch, *_ = next(batches)
    step.gradients(batch).item()  # warm up
    preparing, consuming = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(BATCHES):
            batch, *_ = next(batches)
        preparing.append((time.perf_counter() - started) / BATCHES)
        started = time.perf_counter()
        step.gradients(batch).item()
        t5.zero_grad()
        consuming.append(time.perf_counter() - started)
    prepared, consumed = median(preparing), median(consuming)
    print(
        f"a batch: {prepared * 1e3:.2f} ms, {cfg.optim.batch_size * text.raw_length / prepared:,.0f} tokens of text/s"
    )
    print(f"its forward and backward pass: {consumed * 1e3:.1f} ms")
    print(f"ratio: {consumed / prepared:.0f}")


if __name__ == "__main__":
    bench(sys.argv[1:])
