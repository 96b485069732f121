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


def expected(attentions, batch) -> tuple[list, float]:
    """Shares per layer and head, and chance, with plain loops over Transformers' own attention weights."""
    shares, chances = torch.zeros(3, 4), []
    for row, spans in enumerate(SPANS):
        visible = [s for s in range(12) if batch["attention_mask"][row, s]]
        for t, span in enumerate(spans):
            if span is not None:
                centre = INPUTS[row].index(SENTINELS[span])
                near = [s for s in visible if abs(s - centre) <= NEAR]
                chances.append(len(near) / len(visible))
                for layer, attention in enumerate(attentions):
                    shares[layer] += attention[row, :, t, near].sum(-1)
    return (shares / len(chances)).tolist(), sum(chances) / len(chances)


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
    shares, chance = expected(weights, batch)
    result = alignment.result()
    assert torch.tensor(shares).std() > 0.05
    assert torch.allclose(torch.tensor(result["eval/alignment"]), torch.tensor(shares), atol=1e-5)
    assert result["eval/alignment_chance"] == pytest.approx(chance)


def test_attention_that_is_spread_evenly_is_at_chance(batch):
    config = model.t5_config(300, 0, EOS, **SHAPE)
    built = model.T5(config)
    model.initialize(built, model.initial_distributions(config, "uniform", 1e-8, "normal"), seed=0)
    with torch.no_grad(), Alignment(built, torch.tensor(SENTINELS)) as alignment:
        built(**batch)
        alignment.add(**batch)
    result = alignment.result()
    assert all(
        share == pytest.approx(result["eval/alignment_chance"]) for layer in result["eval/alignment"] for share in layer
    )
    assert not any(module._forward_hooks for module in built.modules())
