import math
import re
from pathlib import Path
from types import SimpleNamespace

import lion_pytorch
import numpy as np
import pytest
import torch
import transformers
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


def test_lion_is_lion_pytorchs():
    ours, theirs = start(), start()
    a = optim.Lion(groups(ours), lr=1e-2, weight_decay=0.1)
    b = lion_pytorch.Lion(groups(theirs), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    assert close(steps(a, ours), steps(b, theirs))


@pytest.mark.parametrize("scale, weight_decay", [(True, 0.0), (False, 0.1)])
def test_adafactor_is_transformers(scale, weight_decay):
    """Theirs scales the decay by RMS(p) too, ours does not: so the two are compared one at a time."""
    ours, theirs = start(), start()
    a = optim.Adafactor(groups(ours), lr=1e-2, weight_decay=weight_decay, rms_scale=scale)
    b = transformers.Adafactor(
        groups(theirs), lr=1e-2, weight_decay=weight_decay, scale_parameter=scale, relative_step=False
    )
    assert close(steps(a, ours), steps(b, theirs))


# The equations, a tensor at a time: (state, gradient, step number from 1) to the direction


def plain_adamw(state, g, t):
    state["m"] = 0.8 * state.get("m", 0) + 0.2 * g
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * g * g
    return math.sqrt(1 - 0.95**t) / (1 - 0.8**t) * state["m"] / (state["v"] ** 0.5 + 0.1)


def plain_lion(state, g, t):
    update = np.sign(0.8 * state.get("m", 0) + 0.2 * g)
    state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
    return update


def plain_sophia(state, g, t):
    if t % 10 == 1:
        state["h"] = 0.95 * state.get("h", 0) + 0.05 * (0.5 * g) ** 2
    state["m"] = 0.8 * state.get("m", 0) + 0.2 * g
    return np.sign(state["m"]) * np.minimum(np.abs(state["m"]) / (0.04 * 12 * state["h"] + 1e-15), 1)


PLAIN = {
    "adamw": (optim.AdamW, {"betas": (0.8, 0.95), "eps": 0.1}, plain_adamw),  # so large an eps shows its place
    "lion": (optim.Lion, {"betas": (0.8, 0.95)}, plain_lion),
    "sophia": (optim.Sophia, {"betas": (0.8, 0.95), "rho": 0.04}, plain_sophia),
}


@pytest.mark.parametrize("rms_scale", [False, True, "init"])
@pytest.mark.parametrize("name", PLAIN)
def test_against_a_plain_loop(name, rms_scale):
    klass, hyperparameters, direction = PLAIN[name]
    ours = start()
    optimizer = klass(ours, lr=1e-2, weight_decay=0.2, rms_scale=rms_scale, **hyperparameters)
    plain, states = [p.detach().numpy() for p in start()], [{} for _ in SHAPES]
    scales = [np.sqrt((p * p).mean()) for p in plain]
    for t in range(1, STEPS + 1):
        if name == "sophia" and t % optimizer.curvature_every == 1:
            for i, p in enumerate(ours):
                p.grad = 0.5 * gradient(t - 1, i)
            optimizer.update_curvature(targets=12)
        steps(optimizer, ours, first=t - 1, count=1)
        for i, p in enumerate(plain):
            scale = {False: 1, True: max(1e-3, np.sqrt((p * p).mean())), "init": scales[i]}[rms_scale]
            plain[i] = (1 - 1e-2 * 0.2) * p - 1e-2 * scale * direction(states[i], gradient(t - 1, i).numpy(), t)
    assert close(ours, map(torch.from_numpy, plain))


def test_sophia_clips_each_coordinate():
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = optim.Sophia([p], betas=(0.0, 0.0), rho=1.0)
    p.grad = torch.tensor([1.0, 1.0, 2.0, 0.0], dtype=torch.float64)
    optimizer.update_curvature(targets=1)
    p.grad = torch.tensor([0.5, 1.5, -2.0, 1e-20], dtype=torch.float64)
    optimizer.step()
    assert torch.allclose(p, -1e-3 * torch.tensor([0.5, 1.0, -0.5, 1e-5], dtype=torch.float64))


def test_sophias_unclipped_share_is_over_all_groups():
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (4, 2, 3)]
    optimizer = optim.Sophia([{"params": params[:1]}, {"params": params[1:]}], betas=(0.0, 0.0), rho=1.0)
    for p in params[:2]:  # the third has no gradient
        p.grad = torch.ones_like(p)
    optimizer.update_curvature(targets=1)
    params[0].grad, params[1].grad = torch.tensor([0.5, -0.9, 1.5, -2.0]), torch.tensor([0.1, 7.0])
    optimizer.step()
    assert optimizer.diagnostics()["unclipped_share"].item() == pytest.approx(3 / 6)


def test_a_tensor_of_zeros_moves_by_a_thousandth():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    optim.AdamW([p], lr=0.1, eps=0.0, rms_scale=True).step()
    assert torch.allclose(p, torch.tensor([-1e-4, 1e-4, -1e-4], dtype=torch.float64))


EVERY = [optim.AdamW, optim.Lion, optim.Sophia, optim.Adafactor]


@pytest.mark.parametrize("klass", EVERY)
def test_parameters_without_gradient_stay(klass):
    params = start()
    before = params[1].detach().clone()
    optimizer = klass(params, weight_decay=0.1)
    params[0].grad = gradient(0, 0)
    optimizer.step()
    assert (params[1] == before).all() and params[1] not in optimizer.state


@pytest.mark.parametrize("rms_scale", [False, True, "init"])
@pytest.mark.parametrize("klass", EVERY)
def test_state_dict_round_trip(klass, rms_scale):
    straight, first, second = start(), start(), start()
    steps(klass(straight, rms_scale=rms_scale), straight, 0, 20)
    optimizer = klass(first, rms_scale=rms_scale)
    halfway = steps(optimizer, first, 0, 10)
    for p, value in zip(second, halfway):
        p.data.copy_(value)
    resumed = klass(second, rms_scale=rms_scale)
    resumed.load_state_dict(optimizer.state_dict())
    steps(resumed, second, 10, 10)
    assert all((a == b).all() for a, b in zip(straight, second))


@pytest.mark.parametrize("klass", EVERY)
def test_state_is_float32_for_bf16_weights(klass):
    params = start(torch.bfloat16)
    optimizer = klass(params)
    for i, p in enumerate(params):
        p.grad = gradient(0, i).bfloat16()
    optimizer.step()
    assert {s.dtype for p in params for s in optimizer.state[p].values()} == {torch.float32}
    assert all(p.dtype == torch.bfloat16 and not p.isnan().any() for p in params)


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
        ({}, 3e-2, True),
        ({"name": "adamw"}, 3e-3, False),
        ({"name": "adamw", "rms_scale": True, "base_lr": 1e-2}, 1e-2, True),
        ({"name": "adamw", "rms_scale": True}, 3e-2, True),
        ({"rms_scale": False}, 3e-3, False),
        ({"name": "lion"}, 3e-4, False),
        ({"name": "lion", "rms_scale": "init"}, 3e-3, "init"),
        ({"name": "sophia", "rms_scale": True}, 3e-3, True),
        ({"name": "adafactor"}, 3e-2, True),
    ],
)
def test_defaults_follow_the_optimizer(changes, lr, rms_scale):
    optimizer = optim.build(config(**changes), torch.nn.Linear(2, 2, bias=False))
    assert all((g["lr"], g["rms_scale"]) == (lr, rms_scale) for g in optimizer.param_groups)


def rates(name, steps=100, base_lr=0.02, relora=None, **changes):
    cfg = SimpleNamespace(optim=config(**changes), relora=relora)
    return [optim.SCHEDULES[name](step, base_lr, cfg) for step in range(steps)]


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
    found = np.array(rates("legacy", steps=50_001, base_lr=123.0, total_steps=50_000))
    found = found[[0, 9_999, 10_000, 40_000, 45_000, 47_500, 50_000]]
    peak = 1 / math.sqrt(45_000)
    assert found == pytest.approx([1e-2, 1e-2, 1e-2, 5e-3, peak, peak / 2, 0.0])


@pytest.mark.parametrize("warm_start_steps, begun", [(0, [40, 80]), (50, [50, 80]), (15, [15, 40, 80])])
def test_jagged_cosine(warm_start_steps, begun):
    relora = SimpleNamespace(every=40, restart_warmup_steps=5, warm_start_steps=warm_start_steps)
    expected = rates("cosine")
    for start in begun:
        expected[start : start + 5] = [expected[start + 5] * i / 5 for i in range(5)]
    assert rates("jagged_cosine", relora=relora) == pytest.approx(expected, rel=1e-12)


def test_the_optimizer_of_the_readme():
    """It is what it says, and gets decay and RMS scaling from the base."""
    readme = (Path(optim.__file__).parent.parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(class .*?)```", readme, re.DOTALL)
    namespace = dict(vars(optim)) | {"OPTIMIZERS": {}}
    exec(code, namespace)
    (klass,) = namespace["OPTIMIZERS"].values()
    ours = start()
    plain, means = [p.detach().clone() for p in ours], [torch.zeros(shape).double() for shape in SHAPES]
    optimizer = klass(ours, lr=1e-2, weight_decay=0.1, rms_scale=True)
    steps(optimizer, ours, count=5)
    for step in range(5):
        for i, p in enumerate(plain):
            means[i] = 0.9 * means[i] + 0.1 * gradient(step, i)
            plain[i] = (1 - 1e-3) * p - 1e-2 * p.square().mean().sqrt() * means[i].sign()
    assert close(ours, plain)
