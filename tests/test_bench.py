"""What the benchmark claims about each way to train, at a size that takes seconds; never how long it takes."""

import bench
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanoT5 import main, model


def test_operations_are_those_that_torch_counts():
    shape = model.t5_config(500, 0, 1, d_model=32, d_kv=8, num_heads=3, d_ff=48, num_layers=2, num_decoder_layers=3)
    shape.dropout_rate = 0.0
    t5 = model.T5(shape)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # of whose products it knows
        t5(torch.randint(2, 500, (5, 20)), torch.randint(2, 500, (5, 7))).loss.backward()
    assert counter.get_total_flops() == bench.flops(shape, 5, 20, 7)


def test_every_way_to_train_computes_the_same(tiny, monkeypatch):
    monkeypatch.setattr(bench, "WORK", {"tiny": (tiny, 8, 8, 1)})
    monkeypatch.setattr(bench, "VOCABULARY", 600)
    monkeypatch.setattr(bench, "MATMUL", {"cpu": 64})
    monkeypatch.setattr(main, "compiling_pays", lambda cfg, device: False)  # test_main.py compiles
    figures = bench.bench("tiny")
    assert {"plain", "auto", "plain + SDPA", "plain + loss by rows", "plain + optimizer"} < figures["variants"].keys()
    for variant, measured in figures["variants"].items():
        loss, gradient = measured["differences"]
        if "bf16" in variant:
            assert 0 < loss < 0.01 and 0 < gradient < 0.1
        else:
            assert loss < 1e-5 and gradient < 1e-5
        assert 0 < measured["peak_bytes"] < 2**35 and measured["tokens/s"] == pytest.approx(
            8 * 40 / measured["seconds"]
        )
