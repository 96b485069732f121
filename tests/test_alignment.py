import pytest
import torch
from transformers import T5ForConditionalGeneration

from nanoT5 import model
from nanoT5.alignment import NEAR, Alignment

SHAPE = dict(d_model=48, d_kv=8, num_heads=4, d_ff=96, num_layers=1, num_decoder_layers=3, dropout_rate=0.0)
SENTINELS = [299 - k for k in range(100)]
EOS, S0, S1, S2 = 1, *SENTINELS[:3]

INPUTS = [
    [10, S0, 11, 12, 13, 14, 15, 16, 17, S1, 18, EOS],
    [20, 21, 22, 23, 24, S0, 25, S1, 26, 27, S2, EOS],
    [30, 31, S0, 32, 33, S1, 34, EOS, 0, 0, 0, 0],  # padded
]
LABELS = [
    [S0, 40, 41, S1, 42, EOS, -100, -100],
    [S0, 43, S1, 44, 45, S2, 46, EOS],
    [S0, 47, S1, 48, EOS, -100, -100, -100],
]
SPANS = [  # of each target token that is text
    [None, 0, 0, None, 1, None, None, None],
    [None, 0, None, 1, 1, None, 2, None],
    [None, 0, None, 1, None, None, None, None],
]


@pytest.fixture
def batch():
    ids = torch.tensor(INPUTS)
    return {"input_ids": ids, "labels": torch.tensor(LABELS), "attention_mask": (ids != 0).long()}


def expected(attentions, batch) -> tuple[list, list]:
    """Alignment and chance of each layer and head, with plain loops over Transformers' own attention weights."""
    aligned, chance, targets = torch.zeros(3, 4), torch.zeros(3, 4), 0
    for row, of_targets in enumerate(SPANS):
        near = {
            k: [s for s in range(12) if abs(s - INPUTS[row].index(SENTINELS[k])) <= NEAR]
            for k in range(3)
            if SENTINELS[k] in INPUTS[row]
        }
        for t, span in enumerate(of_targets):
            if span is not None:
                targets += 1
                for layer, attention in enumerate(attentions):
                    for k, places in near.items():
                        share = attention[row, :, t, places].sum(-1)
                        if k == span:
                            aligned[layer] += share
                        else:
                            chance[layer] += share / (len(near) - 1)
    return (aligned / targets).tolist(), (chance / targets).tolist()


@pytest.mark.parametrize("klass", ["local_t5", "hf_t5"])
def test_shares_are_those_of_transformers_attention_weights(batch, klass):
    config = model.t5_config(300, 0, EOS, **SHAPE)
    built = model.CLASSES[klass](config).eval()
    model.initialize(built, model.initial_distributions(config, "uniform", 0.3, "normal"), seed=0)
    config._attn_implementation = "eager"  # returns attention weights
    theirs = T5ForConditionalGeneration(config).eval()
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    theirs.load_state_dict(built.state_dict())
    with torch.no_grad(), Alignment(built, torch.tensor(SENTINELS)) as alignment:
        for part in (slice(0, 1), slice(1, 3)):  # sums over batches
            piece = {name: column[part] for name, column in batch.items()}
            built(**piece)
            alignment.add(**piece)
        weights = theirs(**batch, output_attentions=True).cross_attentions
    result = alignment.result()
    for name, values in zip(("eval/alignment", "eval/alignment_chance"), expected(weights, batch)):
        assert torch.tensor(values).std() > 0.05
        assert torch.allclose(torch.tensor(result[name]), torch.tensor(values), atol=1e-5), name
    assert not any(module._forward_hooks for module in built.modules())


def test_a_sequence_with_a_single_span_has_no_chance_and_does_not_count(batch):
    config = model.t5_config(300, 0, EOS, **SHAPE)
    built = model.T5(config)
    model.initialize(built, model.initial_distributions(config, "uniform", 0.3, "normal"), seed=0)
    single = {"input_ids": torch.tensor([[10, S0, 11, EOS]]), "labels": torch.tensor([[S0, 12, EOS]])}
    results = []
    for batches in ([batch], [batch, single]):
        with torch.no_grad(), Alignment(built, torch.tensor(SENTINELS)) as alignment:
            for each in batches:
                built(**each)
                alignment.add(**each)
        results.append(alignment.result())
    assert results[0] == results[1]
    with torch.no_grad(), Alignment(built, torch.tensor(SENTINELS)) as alignment:
        built(**single)
        alignment.add(**single)
    assert alignment.result() == {}
