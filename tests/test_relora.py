"""What merging, restarting and resuming have to leave as it was, and what adapters have to be."""

import copy
import math
import shutil
from types import SimpleNamespace

import kill_runs
import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForSeq2SeqLM

from nanoT5 import UserError, main, model, optim, relora

SHAPE = model.t5_config(200, 0, 1, d_model=16, d_kv=4, num_heads=2, d_ff=12, num_layers=2, num_decoder_layers=2)
DEFAULTS = {
    **dict(rank=4, alpha=8.0, dropout=0.0, every=5, warm_start_steps=0, restart_warmup_steps=2, init="kaiming"),
    **dict(reset_optimizer="none", reset_ratio=0.75, modules="SelfAttention|EncDecAttention|DenseReluDense"),
}
IDENTITY = dict(init="identity", rank=None, alpha=None)
ADAPTED = 7 * 2 + 11 * 2  # q, k, v, o, wi_0, wi_1, wo of two blocks; with four more of cross-attention


def settings(**changes) -> SimpleNamespace:
    return SimpleNamespace(**(DEFAULTS | changes))


def plain(dtype=torch.float32) -> torch.nn.Module:
    t5 = model.T5(copy.deepcopy(SHAPE)).to(dtype)
    model.initialize(t5, model.initial_distributions(SHAPE, "t5", 1.0, "normal"), 0)
    return t5.eval()


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(2, 200, (4, 9), generator=generator),
        "labels": torch.randint(2, 200, (4, 5), generator=generator),
    }


def trained(t5: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        t5(**batch(step)).loss.backward()
        if isinstance(optimizer, optim.Sophia) and optimizer.curvature_is_due():
            optimizer.update_curvature(20)
        optimizer.step()
        optimizer.zero_grad()


def build(name: str, t5: torch.nn.Module, rms_scale=False) -> optim.Optimizer:
    cfg = SimpleNamespace(name=name, base_lr=1e-2, rms_scale=rms_scale, weight_decay=0.0)
    return optim.build(cfg, t5)


@pytest.mark.parametrize("changes", [{}, IDENTITY], ids=["kaiming", "identity"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-9)])
def test_wrapping_merging_and_restarting_leave_the_function_as_it_was(changes, dtype, tolerance):
    t5, cfg = plain(dtype), settings(**changes)
    before = t5(**batch(0)).logits
    relora.wrap(t5, cfg, seed=0)
    assert len(relora.adapted(t5)) == ADAPTED
    assert torch.equal(t5(**batch(0)).logits, before)
    optimizer = build("adamw", t5)
    for _ in range(3):
        trained(t5, optimizer, range(3))
        before = t5(**batch(0)).logits
        relora.restart(t5, optimizer, cfg, seed=0, step=3)
        assert (t5(**batch(0)).logits - before).abs().max() <= tolerance * before.abs().max()


def test_only_adapters_and_what_has_none_is_trained():
    t5 = plain()
    relora.wrap(t5, settings(), seed=0)
    frozen = {name for name, p in t5.named_parameters() if not p.requires_grad}
    assert len(frozen) == ADAPTED and all("Attention" in name or "DenseReluDense" in name for name in frozen)
    before = {name: p.clone() for name, p in t5.named_parameters()}
    optimizer = build("adamw", t5)
    trained(t5, optimizer, range(2))
    changed = {name for name, p in t5.named_parameters() if not torch.equal(p, before[name])}
    assert changed == before.keys() - frozen
    assert {name for name, p in t5.named_parameters() if p in optimizer.state} == changed


@pytest.mark.parametrize("modules, count", [("EncDecAttention", 8), (r"\.[qv]$", 12), ("wo", 4)])
def test_modules_are_chosen_by_a_pattern(modules, count):
    t5 = plain()
    relora.wrap(t5, settings(modules=modules), seed=0)
    assert len(relora.adapted(t5)) == count


def test_adapters_learn_after_every_restart():
    """B from the first step on, A from the second; were both zero, neither ever would."""
    t5, cfg = plain(), settings(reset_optimizer="zero")
    relora.wrap(t5, cfg, seed=0)
    optimizer, drawn = build("adamw", t5), []
    for restart in range(3):
        for steps in (1, 2):
            t5(**batch(steps)).loss.backward()
            for module in relora.adapted(t5):
                assert module.lora_B.grad.any() and bool(module.lora_A.grad.any()) == (steps == 2)
            optimizer.step()
            optimizer.zero_grad()
        relora.restart(t5, optimizer, cfg, seed=0, step=restart)
        drawn.append([module.lora_A.detach().clone() for module in relora.adapted(t5)])
    assert all(not torch.equal(a, b) for a, b in zip(drawn[0], drawn[1]))
    for rows in drawn[0]:
        assert len(rows.unique()) == rows.numel()  # no row is that of another process again
        assert rows.abs().max() <= rows.shape[1] ** -0.5 and rows.std() == pytest.approx(
            (3 * rows.shape[1]) ** -0.5, rel=0.35
        )


@pytest.mark.parametrize("name", ["adamw", "lion", "sophia", "adafactor"])
@pytest.mark.parametrize("kind, share", [("none", 0.0), ("zero", 1.0), ("magnitude", 0.75), ("random", 0.75)])
def test_a_restart_zeroes_the_share_of_the_optimizers_state_that_was_asked_for(name, kind, share):
    t5, cfg = plain(), settings(reset_optimizer=kind)
    relora.wrap(t5, cfg, seed=0)
    optimizer = build(name, t5)
    trained(t5, optimizer, range(3))
    before = {p: {key: tensor.clone() for key, tensor in optimizer.state[p].items()} for p in optimizer.state}
    relora.restart(t5, optimizer, cfg, seed=0, step=3)
    adapters = set(relora.parameters(t5))
    assert sum(group["steps"] for group in optimizer.param_groups) == (6 if kind == "zero" else 9)
    for parameter, state in before.items():
        for key, tensor in state.items():
            now = optimizer.state[parameter][key]
            if key == "smallest_scale":
                continue
            if parameter not in adapters:
                assert torch.equal(now, tensor)
                continue
            zeros = (tensor == 0).sum().item()
            assert (now == 0).sum().item() >= round(share * tensor.numel())
            assert (now == 0).sum().item() <= round(share * tensor.numel()) + zeros
            kept = now != 0
            assert torch.equal(now[kept], tensor[kept])
            if kind == "magnitude" and kept.any():
                assert tensor[kept].abs().min() >= tensor[~kept].abs().max()


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "sophia", "adafactor"])
def test_identity_is_full_training(name):
    full, low, cfg = plain(torch.float64), plain(torch.float64), settings(**IDENTITY)
    relora.wrap(low, cfg, seed=0)
    optimizers = []
    for t5 in (full, low):
        parameters = [p for p in t5.parameters() if p.requires_grad]
        optimizers.append(torch.optim.SGD(parameters, 0.1) if name == "sgd" else build(name, t5))
    for step in range(12):
        for t5, optimizer in zip((full, low), optimizers):
            trained(t5, optimizer, range(step, step + 1))
        if step % 5 == 4 and name != "sgd":
            relora.restart(low, optimizers[1], cfg, seed=0, step=step)
        expected = full.state_dict()
        found = relora.without_adapters(low.state_dict(), low)
        assert found.keys() == expected.keys()
        for key in expected:
            assert torch.allclose(found[key], expected[key], rtol=0, atol=1e-9), (step, key)


def test_rms_scaling_moves_a_matrix_as_far_through_its_adapters():
    """Sign updates, so that every entry of B moves by lr times its scale."""
    t5 = plain()
    relora.wrap(t5, settings(rank=8), seed=0)
    optimizer = build("lion", t5, rms_scale=True)
    relora.set_floors(t5, optimizer)
    weights = [module.weight.clone() for module in relora.adapted(t5)]
    trained(t5, optimizer, range(1))
    ratios = torch.tensor(
        [
            m.change().detach().square().mean().sqrt() / w.square().mean().sqrt()
            for m, w in zip(relora.adapted(t5), weights)
        ]
    )
    assert ratios.median().item() == pytest.approx(1e-2, rel=0.3)


def test_forward_and_merge_are_pefts():
    linear = torch.nn.Linear(12, 10, bias=False)
    ours = relora.LowRank(copy.deepcopy(linear), settings())
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], lora_dropout=0.0)
    theirs = peft.get_peft_model(torch.nn.Sequential(copy.deepcopy(linear)), config)
    layer = theirs.base_model.model[0]
    generator = torch.Generator().manual_seed(0)
    for parameter, their in ((ours.lora_A, layer.lora_A["default"]), (ours.lora_B, layer.lora_B["default"])):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        their.weight.data.copy_(parameter)
    x = torch.randn(3, 12, generator=generator)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)
    relora.merge(torch.nn.Sequential(ours))
    assert torch.allclose(ours.weight, theirs.merge_and_unload()[0].weight, atol=1e-6)


OPTIONS = [
    *("optim.total_steps=16", "optim.lr_scheduler=jagged_cosine", "checkpoint.every_steps=1", "checkpoint.keep=null"),
    *("eval.every_steps=8", "eval.steps=1", "logging.every_steps=2", "relora.rank=4", "relora.every=5"),
    *(
        "relora.warm_start_steps=3",
        "relora.restart_warmup_steps=2",
        "relora.dropout=0.1",
        "relora.reset_optimizer=random",
    ),
]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("relora") / "run"
    main.run([*tiny, *OPTIONS, f"hydra.run.dir={folder}"])
    return folder


@pytest.mark.parametrize("step", [2, 3, 4, 9, 10, 11])
def test_a_run_killed_around_the_beginning_of_adapters_is_the_same_to_the_bit(tiny, whole, tmp_path, step):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    for later in range(step + 1, 17):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{later}")
    main.run([*tiny, *OPTIONS, f"hydra.run.dir={tmp_path}/run"])
    assert kill_runs.outcome(whole, 16) == kill_runs.outcome(tmp_path / "run", 16)


def test_the_export_has_no_adapters_and_is_the_trained_model(whole, documents):
    exported = AutoModelForSeq2SeqLM.from_pretrained(whole / "model")
    names = safetensors.torch.load_file(whole / "model/model.safetensors").keys()
    assert not [name for name in names if "lora" in name]
    t5 = model.T5(exported.config)
    relora.wrap(t5, settings(alpha=None), seed=0)
    last = safetensors.torch.load_file(whole / "checkpoints/step-16/model.safetensors")
    assert not t5.load_state_dict(last, strict=False).unexpected_keys
    inputs = batch(0)
    with torch.no_grad():
        assert torch.allclose(t5.eval()(**inputs).logits, exported(**inputs).logits, atol=1e-4)


def test_optimizer_state_is_that_of_the_trainable_part(whole):
    names = safetensors.torch.load_file(whole / "checkpoints/step-16/optimizer.safetensors").keys()
    adapted = [name for name in names if "Attention" in name or "DenseReluDense" in name]
    assert adapted and all("lora_" in name or "relative" in name for name in adapted)


def test_more_steps_between_restarts_than_there_are_is_plain_lora(tiny, tmp_path):
    options = ["relora.rank=4", "relora.every=1000", "optim.total_steps=8"]
    summary = main.run([*tiny, *options, f"hydra.run.dir={tmp_path}"])
    assert math.isfinite(summary["eval/loss"]) and summary["trainable_parameters"] < summary["parameters"]


@pytest.mark.parametrize(
    "options, words",
    [
        (["relora.rank=33"], "relora.rank=33 .* give 32 at most"),
        (["relora.rank=4", "relora.warm_start_steps=6"], "warm_start_steps=6 leaves no step"),
        (["relora.rank=4", "relora.every=5", "relora.restart_warmup_steps=5"], "has to be below relora.every=5"),
        (["relora.rank=4", "relora.init=identity"], "have no part in relora.init=identity"),
        (["relora.rank=4", "model.blind_encoder=true"], "do not go together"),
        (["relora.rank=4", "relora.modules='('"], "not a regular expression"),
        (["optim.lr_scheduler=jagged_cosine"], "give relora.rank"),
    ],
)
def test_refusals(tiny, tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        main.run([*tiny, *options, f"hydra.run.dir={tmp_path}"])
