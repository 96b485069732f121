import pytest
import torch
from accelerate import Accelerator
from omegaconf import OmegaConf

from nanoT5 import model, optim, step


@pytest.mark.parametrize("splits", [2, 4])
def test_gradients_of_micro_batches_with_uneven_padding(splits):
    """The loss is a mean over all target tokens of the batch, however they are spread over its micro batches."""
    shape = model.t5_config(200, 0, 1, d_model=16, d_kv=4, num_heads=2, d_ff=8, num_layers=1, num_decoder_layers=1)
    shape.dropout_rate = 0.0
    t5 = model.T5(shape)
    model.initialize(t5, model.initial_distributions(shape, "t5", 1.0, "normal"), 0)
    ids = torch.arange(2, 82).reshape(8, 10)
    labels = ids.clone()
    for row in range(8):
        labels[row, row + 1 :] = model.IGNORED
    t5(ids, labels).loss.backward()
    expected = [p.grad.clone() for p in t5.parameters()]
    t5.zero_grad()
    trained = step.Step(t5, None, Accelerator(cpu=True), "fp32", OmegaConf.create({"grad_acc": splits}), seed=0)
    loss = trained.gradients({"input_ids": ids, "labels": labels})
    assert torch.allclose(loss, t5(ids, labels).loss)
    assert all(torch.allclose(p.grad, e, atol=1e-6) for p, e in zip(t5.parameters(), expected))


def test_sophias_labels_are_drawn_from_the_model():
    """Where the model is certain they are its answer, whatever the true labels; padding stays padding."""
    logits = torch.full((1, 3, 5), -50.0)
    logits[0, 0, 1] = logits[0, 1, 4] = 50.0
    drawn = model.drawn_labels(logits, torch.tensor([[2, 3, model.IGNORED]]), torch.tensor([[0.001, 0.999, 0.5]]))
    assert drawn.tolist() == [[1, 4, model.IGNORED]]
    odds = torch.tensor([1.0, 2.0, 4.0, 1.0])
    draws = torch.rand(1, 20_000, generator=torch.Generator().manual_seed(0))
    drawn = model.drawn_labels(odds.log().expand(1, 20_000, 4), torch.zeros(1, 20_000, dtype=torch.long), draws)
    assert torch.allclose(drawn.flatten().bincount() / 20_000, odds / 8, atol=0.02)


def test_sophias_curvature_takes_in_finite_gradients_only():
    weights = torch.nn.Linear(2, 1, bias=False)
    sophia = optim.Sophia(weights.parameters(), lr=0.1)
    once = step.Step(weights, sophia, Accelerator(cpu=True), "fp32", OmegaConf.create({"grad_clip": 1.0}), seed=0)
    values = {"sampled": float("nan"), "true": 1.0}

    def gradients(batch):
        weights.weight.grad = torch.full((1, 2), values["sampled" if "draws" in batch else "true"])
        return torch.tensor(1.0)

    once.gradients = gradients
    batch = {"labels": torch.zeros(4, 5, dtype=torch.long)}
    once(batch, 0.1, 0)
    assert not sophia.state[weights.weight]["curvature"].any() and weights.weight.isfinite().all()
