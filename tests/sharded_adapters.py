"""Asserts, in each of two processes, how adapters are cut up by FSDP2: argv is the overrides of a run."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from nanoT5 import config, data, main, relora
from nanoT5.step import Step

cfg, _ = config.load(sys.argv[1:])
accelerator = main.set_up(cfg)
with accelerator.local_main_process_first():
    text = data.build(cfg)
shape = main.model_shape(cfg, text.tokenizer)
t5, trained, optimizer = main.assemble(cfg, shape, accelerator, 0, None, None)
step = Step(trained, optimizer, accelerator, "fp32", cfg.optim, cfg.seed)
batch, *_ = next(text.batches(None, accelerator.process_index, accelerator.num_processes))
step.gradients(batch)

local = {True: 0, False: 0}  # numbers that this process holds, by whether they are trained
for parameter in t5.parameters():
    assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
    local[parameter.requires_grad] += parameter.to_local().numel()
    assert (parameter.grad is not None) == parameter.requires_grad
assert sum(p.grad.to_local().numel() for p in t5.parameters() if p.requires_grad) == local[True]
optimizer.step()
state = [t.to_local().numel() for values in optimizer.state.values() for t in values.values() if t.dim()]
assert sum(state) == 2 * local[True]  # AdamW's two moments

before = step.trained(**batch).loss.item()
relora.restart(t5, optimizer, cfg.relora, cfg.seed, 1)
assert abs(step.trained(**batch).loss.item() - before) < 1e-5 * before
for module in relora.adapted(t5):
    assert not module.lora_B.full_tensor().any() and module.weight.placements == (Shard(0),)
    rows = module.lora_A.full_tensor()
    both = [torch.empty_like(rows) for _ in range(2)]
    dist.all_gather(both, rows)
    assert torch.equal(*both) and len(rows.unique()) == rows.numel()
accelerator.wait_for_everyone()
accelerator.end_training()  # else one may find the other gone while it ends itself
