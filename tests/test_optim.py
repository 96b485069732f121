import math
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from nanoT5 import model, optim

SHAPES = [(4, 3), (7,), (2, 3, 5)]
STEPS = 50


def start(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradient(step: int, i: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + i)
    return torch.randn(SHAPES[i], generator=generator).double()


def steps(optimizer, params, first=0, count=STEPS):
    for step in range(first, first + count):
        for i, p in enumerate(params):
            p.grad = gradient(step, i)
        optimizer.step()
    return [p.detach().clone() for p in params]


def groups(params):
    return [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0, "lr": 3e-3}]


def close(ours, theirs):
    return all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(ours, theirs, strict=True))


def test_adamw_is_torchs():
    ours, theirs = start(), start()
    a = optim.AdamW(groups(ours), lr=1e-2, eps=1e-16, weight_decay=0.1)
    b = torch.optim.AdamW(groups(theirs), lr=1e-2, betas=(0.9, 0.999), eps=1e-16, weight_decay=0.1)
    assert close(steps(a, ours), steps(b, theirs))


@pytest.mark.parametrize("rms_scale", [False, True])
def test_adamw_against_a_plain_loop(rms_scale):
    """The equations of the docstrings, one number at a time; a large eps makes its place matter."""
    ours = start()
    steps(optim.AdamW(ours, lr=1e-2, betas=(0.8, 0.95), eps=0.1, weight_decay=0.2, rms_scale=rms_scale), ours)
    plain = [p.detach().numpy() for p in start()]
    mean, square = [0 * p for p in plain], [0 * p for p in plain]
    for t in range(1, STEPS + 1):
        for i, p in enumerate(plain):
            g = gradient(t - 1, i).numpy()
            mean[i] = 0.8 * mean[i] + 0.2 * g
            square[i] = 0.95 * square[i] + 0.05 * g * g
            scale = max(1e-3, math.sqrt((p * p).mean())) if rms_scale else 1
            direction = math.sqrt(1 - 0.95**t) / (1 - 0.8**t) * mean[i] / (square[i] ** 0.5 + 0.1)
            plain[i] = (1 - 1e-2 * 0.2) * p - 1e-2 * scale * direction
    assert close(ours, map(torch.from_numpy, plain))


def test_a_tensor_of_zeros_moves_by_a_thousandth():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    optim.AdamW([p], lr=0.1, eps=0.0, rms_scale=True).step()
    assert torch.allclose(p, torch.tensor([-1e-4, 1e-4, -1e-4], dtype=torch.float64))


def test_parameters_without_gradient_stay():
    params = start()
    before = params[1].detach().clone()
    optimizer = optim.AdamW(params, weight_decay=0.1)
    params[0].grad = gradient(0, 0)
    optimizer.step()
    assert (params[1] == before).all() and params[1] not in optimizer.state


def test_state_dict_round_trip():
    straight, first, second = start(), start(), start()
    steps(optim.AdamW(straight, rms_scale=True), straight, 0, 20)
    optimizer = optim.AdamW(first, rms_scale=True)
    halfway = steps(optimizer, first, 0, 10)
    for p, value in zip(second, halfway):
        p.data.copy_(value)
    resumed = optim.AdamW(second, rms_scale=True)
    resumed.load_state_dict(optimizer.state_dict())
    steps(resumed, second, 10, 10)
    assert all((a == b).all() for a, b in zip(straight, second))


def test_state_is_float32_for_bf16_weights():
    params = start(torch.bfloat16)
    optimizer = optim.AdamW(params)
    for i, p in enumerate(params):
        p.grad = gradient(0, i).bfloat16()
    optimizer.step()
    assert {s.dtype for p in params for s in optimizer.state[p].values()} == {torch.float32}


def config(**changes):
    defaults = dict(name="adamwscale", base_lr=None, rms_scale=None, weight_decay=0.1)
    defaults |= dict(warmup_steps=10, total_steps=100, final_cosine=1e-5, lr_scheduler="cosine")
    return SimpleNamespace(**(defaults | changes))


def test_every_parameter_is_in_one_group():
    t5 = model.T5(
        model.t5_config(300, 0, 1, d_model=16, d_kv=4, num_heads=2, d_ff=8, num_layers=1, num_decoder_layers=1)
    )
    decayed, others = optim.build(config(), t5).param_groups
    names = {p: name for name, p in t5.named_parameters()}
    assert sorted(names[p] for g in (decayed, others) for p in g["params"]) == sorted(names.values())
    assert all("layer_norm" in names[p] or "relative_attention_bias" in names[p] for p in others["params"])
    assert not any("norm" in names[p] or "bias" in names[p] for p in decayed["params"])
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize(
    "changes, lr, rms_scale",
    [
        ({}, 4e-2, True),
        ({"name": "adamw"}, 2e-3, False),
        ({"name": "adamw", "rms_scale": True, "base_lr": 1e-2}, 1e-2, True),
        ({"name": "adamw", "rms_scale": True}, 4e-2, True),
        ({"rms_scale": False}, 2e-3, False),
    ],
)
def test_defaults_follow_the_optimizer(changes, lr, rms_scale):
    optimizer = optim.build(config(**changes), torch.nn.Linear(2, 2, bias=False))
    assert all((g["lr"], g["rms_scale"]) == (lr, rms_scale) for g in optimizer.param_groups)


def rates(name, **changes):
    return [optim.SCHEDULES[name](step, 0.02, config(**changes)) for step in range(100)]


def test_cosine_is_that_of_the_2023_trainer():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    warmup = LinearLR(optimizer, start_factor=0.5, end_factor=1.0, total_iters=10)
    decay = CosineAnnealingLR(optimizer, T_max=90, eta_min=1e-5)
    scheduler = SequentialLR(optimizer, [warmup, decay], milestones=[10])
    expected = []
    for _ in range(100):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates("cosine") == pytest.approx(expected, rel=1e-9)
    assert rates("cosine", warmup_steps=0)[0] == 0.02


def test_constant():
    assert rates("constant")[::5] == pytest.approx([0.01, 0.015] + [0.02] * 18)


def test_legacy():
    found = [
        optim.legacy(step, 123.0, config(total_steps=50_000))
        for step in (0, 9_999, 10_000, 40_000, 45_000, 47_500, 50_000)
    ]
    peak = 1 / math.sqrt(45_000)
    assert found == pytest.approx([1e-2, 1e-2, 1e-2, 5e-3, peak, peak / 2, 0.0])
