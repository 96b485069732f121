import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import T5ForConditionalGeneration

from nanoT5 import model

SHAPE = dict(d_model=48, d_kv=8, num_heads=4, d_ff=96, num_layers=2, num_decoder_layers=3, dropout_rate=0.0)


def mixed(config) -> dict:
    return model.initial_distributions(config, "hf", init_std=1.0, init_distribution="normal")


def pair():
    """(our model, Transformers' model) with the same weights."""
    config = model.t5_config(300, 0, 1, **SHAPE)
    ours = model.T5(config)
    model.initialize(ours, mixed(config), seed=3)
    theirs = model.hf_t5(config)
    assert not theirs.load_state_dict(ours.state_dict()).missing_keys
    return ours.eval(), theirs.eval()


@pytest.fixture(params=["whole", "padded"])
def batch(request):
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(2, 300, (3, 150), generator=generator)  # longer than the last bucket's distance of 128
    labels = torch.randint(2, 300, (3, 21), generator=generator)
    if request.param == "whole":
        return {"input_ids": input_ids, "labels": labels}
    attention_mask = torch.ones_like(input_ids)
    for row, (length, target_length) in enumerate([(150, 21), (77, 9), (3, 1)]):
        attention_mask[row, length:] = 0
        input_ids[row, length:] = 0
        labels[row, target_length:] = model.IGNORED
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


@pytest.mark.parametrize("rows", [1024, 16])
def test_logits_loss_and_gradients_are_those_of_transformers(batch, rows, monkeypatch):
    monkeypatch.setattr(model.HeadLoss, "ROWS", rows)  # of logits at a time: all, or some
    ours, theirs = pair()
    results = [m.eval()(**batch) for m in (ours, theirs)]
    valid = batch["labels"] != model.IGNORED
    assert torch.allclose(results[0].logits[valid], results[1].logits[valid], atol=1e-4)
    assert torch.allclose(results[0].loss, results[1].loss, atol=1e-4)
    losses = [m.train()(**batch).loss for m in (ours, theirs)]
    assert torch.allclose(*losses, atol=1e-4)
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        assert torch.allclose(p.grad, gradients.pop(name), atol=1e-4, rtol=1e-4), name
    assert not gradients
    assert ours.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.abs().max() > 0


HEAD = {"fp64": (torch.float64, 1e-12), "fp32": (torch.float32, 1e-5), "bf16": (torch.float32, 2e-2)}


@pytest.mark.parametrize("draws", [None, "draws"])
@pytest.mark.parametrize("precision", HEAD)
def test_the_loss_by_rows_is_cross_entropy(precision, draws, monkeypatch):
    monkeypatch.setattr(model.HeadLoss, "ROWS", 16)
    dtype, tolerance = HEAD[precision]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 25, 32, generator=generator, dtype=dtype)
    head = torch.randn(500, 32, generator=generator, dtype=dtype)  # as large as Transformers draws it
    labels = torch.randint(500, (4, 25), generator=generator)
    labels[0, 20:] = model.IGNORED
    draws = draws and torch.rand(4, 25, generator=generator)

    def plain(hidden, head, labels, draws):
        logits = hidden @ head.T
        return model.cross_entropy(logits, labels if draws is None else model.drawn_labels(logits, labels, draws))

    results = []
    for function in (model.HeadLoss.apply, plain):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, head)]
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = function(*leaves, labels, draws)
        (3 * loss).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results):
        assert ours.dtype == theirs.dtype and (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_training_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(model.HeadLoss, "ROWS", 16)
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            largest.append(max((t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)), default=0))
            return result

    ours, _ = pair()
    labels = torch.randint(2, 300, (8, 40))
    with Watch():
        ours.train()(torch.randint(2, 300, (8, 10)), labels).loss.backward()
    assert max(largest) < labels.numel() * ours.lm_head.out_features


def test_names_are_those_of_transformers():
    ours, theirs = pair()
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}


@pytest.mark.parametrize("name, count", [("small", 76_961_152), ("base", 247_577_856), ("large", 783_150_080)])
@pytest.mark.parametrize("klass", ["local_t5", "hf_t5"])
def test_parameter_counts(name, count, klass):
    from omegaconf import OmegaConf

    from nanoT5 import config

    shape = OmegaConf.to_container(OmegaConf.load(config.FOLDER / "model" / f"{name}.yaml"))
    with torch.device("meta"):
        built = model.CLASSES[klass](model.t5_config(32_100, 0, 1, dropout_rate=0.0, **shape))
    assert sum(p.numel() for p in built.parameters()) == count


@pytest.mark.parametrize("size, rounded", [(4196, 4224), (32_100, 32_128), (256, 256), (257, 384)])
def test_vocabulary_is_a_multiple_of_128(size, rounded):
    assert model.t5_config(size, 0, 1, **SHAPE).vocab_size == rounded


WIDE = SHAPE | {"d_model": 96, "d_kv": 32, "d_ff": 160}
MIXED = {
    "q": (96 * 32) ** -0.5,
    "k": 96**-0.5,
    "v": 96**-0.5,
    "o": 128**-0.5,
    "relative_attention_bias": 96**-0.5,
    "wi_0": 96**-0.5,
    "wi_1": 96**-0.5,
    "wo": 160**-0.5,
    "shared": 1.0,
    "lm_head": 1.0,
}


@pytest.mark.parametrize("klass", ["local_t5", "hf_t5"])
@pytest.mark.parametrize(
    "init, distribution, expected, bounded",
    [
        ("hf", "normal", MIXED, set()),
        ("t5", "uniform", MIXED | {"lm_head": 96**-0.5}, set(MIXED)),
        ("uniform", "normal", dict.fromkeys(MIXED, 0.03), set()),
        ("uniform", "uniform", dict.fromkeys(MIXED, 0.03), set(MIXED)),
        ("small_embedding", "normal", MIXED | {"lm_head": 96**-0.5, "shared": 1e-4 / 3**0.5}, {"shared"}),
    ],
)
def test_initializations(klass, init, distribution, expected, bounded):
    """Mean, standard deviation and shape of every class of weight; the mixed ones as Transformers itself draws them."""
    config = model.t5_config(2000, 0, 1, **WIDE)
    built = model.CLASSES[klass](config)
    if init == "small_embedding":
        model.add_embedding_norm(built, config)
    model.initialize(built, model.initial_distributions(config, init, 0.03, distribution), seed=0)
    theirs = dict(T5ForConditionalGeneration(config).named_parameters()) if init == "hf" else {}
    seen = set()
    for name, p in built.named_parameters():
        kind = name.split(".")[-2]
        if "norm" in kind:
            assert (p == 1).all()
            continue
        seen.add(kind)
        tolerance = 5 / (2 * p.numel()) ** 0.5  # five standard errors of a standard deviation
        assert p.std().item() == pytest.approx(expected[kind], rel=tolerance), name
        assert abs(p.mean().item()) < 5 * expected[kind] / p.numel() ** 0.5, name
        if name in theirs:  # its head is tied to the embedding when it is drawn, at the same deviation
            assert theirs[name].std().item() == pytest.approx(expected[kind], rel=tolerance), name
        largest = p.abs().max().item() / (3**0.5 * expected[kind])
        assert (largest <= 1) if kind in bounded else (largest > 1), name
    assert seen == set(expected)


def test_the_deviation_of_single_classes():
    config = model.t5_config(2000, 0, 1, **WIDE)
    before, after = mixed(config), model.initial_distributions(config, "hf", 1.0, "normal", {"q": 0.5, "wo": None})
    assert before.pop("q") == ("normal", MIXED["q"]) and after.pop("q") == ("normal", 0.5) and before == after


@pytest.mark.parametrize("klass", ["local_t5", "hf_t5"])
def test_small_embeddings_are_normed(klass):
    """The norm is where encoder and decoder look tokens up, and only there: a larger table changes nothing."""
    config = model.t5_config(300, 0, 1, **SHAPE)
    built = model.CLASSES[klass](config)
    model.add_embedding_norm(built, config)
    model.initialize(built, mixed(config), seed=0)
    ids = torch.arange(40).reshape(2, 20) + 2
    before = built(input_ids=ids, labels=ids).loss.item()
    with torch.no_grad():
        built.shared.weight.mul_(7)
    assert built(input_ids=ids, labels=ids).loss.item() == pytest.approx(before, rel=1e-5)
    assert sum("norm" in name and "shared" in name for name, _ in built.named_parameters()) == 1

    model.initialize(built, model.initial_distributions(config, "small_embedding", 1.0, "normal"), seed=0)
    first = built.shared(ids)  # of elements with a mean square of 1e-8 / 3 beside an epsilon of 1e-6
    assert first.square().mean().item() == pytest.approx(1 / (1 + 300), rel=0.1)


@pytest.mark.parametrize("klass", ["local_t5", "hf_t5"])
def test_a_blind_encoder_stays_cut_off(klass):
    config = model.t5_config(300, 0, 1, **SHAPE)
    built = model.CLASSES[klass](config)
    model.initialize(built, mixed(config), seed=0)
    model.blind(built)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    labels = torch.arange(40).reshape(2, 20) + 2
    for shift in (0, 50):
        built(input_ids=labels + shift, labels=labels).loss.backward()
        optimizer.step()
    assert built.lm_head.weight.grad.abs().max() > 0
    seen = [built.eval()(input_ids=labels + shift, labels=labels).logits for shift in (0, 100)]
    assert torch.equal(*seen)


def test_initialization_follows_the_seed_alone():
    config = model.t5_config(300, 0, 1, **SHAPE)
    models = [model.T5(config), model.T5(config), model.hf_t5(config)]
    for built, seed in zip(models, (1, 1, 1)):
        model.initialize(built, mixed(config), seed)
    first = dict(models[0].named_parameters())
    for other in models[1:]:
        assert all((p == first[name]).all() for name, p in other.named_parameters())
    model.initialize(models[1], mixed(config), 2)
    assert (models[1].lm_head.weight != first["lm_head.weight"]).all()


def test_a_parameter_without_a_rule_is_an_error():
    config = model.t5_config(300, 0, 1, **SHAPE)
    built = model.T5(config)
    built.encoder.extra = torch.nn.Linear(2, 2)
    with pytest.raises(LookupError, match="encoder.extra.weight"):
        model.initialize(built, mixed(config), 0)


def test_dropout_is_in_the_places_where_transformers_has_it():
    config = model.t5_config(300, 0, 1, **(SHAPE | {"dropout_rate": 0.5}))
    counts = [
        sorted(name for name, m in klass(config).named_modules() if isinstance(m, torch.nn.Dropout))
        for klass in (model.T5, model.hf_t5)
    ]
    assert counts[0] == counts[1]
    ours = model.T5(config)
    ids = torch.arange(20)[None] + 2
    assert ours(ids, ids).loss != ours(ids, ids).loss
    ours.eval()
    assert ours(ids, ids).loss == ours(ids, ids).loss


def test_bf16_autocast_is_close_and_reaches_the_bias():
    ours, _ = pair()
    ids = torch.arange(60).reshape(2, 30) + 2
    exact = ours(ids, ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        rounded = ours(ids, ids).loss
    assert rounded.dtype == torch.float32 and rounded.item() == pytest.approx(exact.item(), rel=0.02)
    rounded.backward()
    assert ours.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.abs().max() > 0


def test_the_initialization_of_the_readme_is_one(monkeypatch):
    monkeypatch.setattr(model, "INITIALIZATIONS", dict(model.INITIALIZATIONS))
    readme = (Path(model.__file__).parent.parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(INITIALIZATIONS.*?)```", readme, re.DOTALL)
    exec(code, vars(model))
    drawn = model.initial_distributions(model.t5_config(300, 0, 1, **SHAPE), "flat_attention", 0.03, "normal")
    assert drawn["q"] == drawn["k"] == ("normal", 0.03) and drawn["shared"] == ("normal", 1.0)
