"""Asserts, in each of two processes, that gradients are averaged once a step: argv is the overrides of a run."""

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from nanoT5 import config, data, main
from nanoT5.step import Step

cfg, _ = config.load(sys.argv[1:])
accelerator = main.set_up(cfg)
with accelerator.local_main_process_first():
    text = data.build(cfg)
t5, trained, optimizer = main.assemble(cfg, main.model_shape(cfg, text.tokenizer), accelerator, 0, None, None)
batch, *_ = next(text.batches(None, accelerator.process_index, accelerator.num_processes))


def collectives(grad_acc: int) -> int:
    """How often gradients are sent in one step of so many micro batches."""
    cfg.optim.grad_acc = grad_acc
    step = Step(trained, optimizer, accelerator, "fp32", cfg.optim, cfg.seed)
    step.gradients(batch)  # the first time prepares buckets
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step.gradients(batch)
    optimizer.zero_grad()
    sent = ("gloo:reduce_scatter", "gloo:all_reduce") if main.parallelism(cfg) == "ddp" else ("reduce_scatter",)
    return sum(event.count for event in profiler.key_averages() if any(name in event.key for name in sent))


torch.set_num_threads(1)
once = collectives(1)
assert once > 0, "none seen"
assert collectives(4) == once
accelerator.wait_for_everyone()
accelerator.end_training()  # else one may find the other gone while it ends itself
