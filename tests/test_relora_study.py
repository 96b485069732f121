"""What the study of ReLoRA measures of a run."""

import csv
import importlib
import sys

import pytest
import study as studies

from nanoT5 import main

script = importlib.import_module("relora")  # scripts/relora.py
LOW = ("relora.rank=4", "relora.every=1000")


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A study of two cells, with one run each."""
    folder = tmp_path_factory.mktemp("study")
    for cell in (script.Cell("full"), script.Cell("lora", LOW)):
        run = studies.Run(folder, cell, 3e-2, 0)
        options = ["optim.total_steps=20", "logging.every_steps=5", f"hydra.run.dir={run.folder}"]
        main.run([*tiny, *run.overrides, *options])
    return folder


def test_the_rank_of_the_change_is_that_of_the_adapters(folder):
    full, low = (script.change(folder / name / "lr0.03-seed0") for name in ("full", "lora"))
    assert full["rank_of_change"] > 0.8
    assert 1 / 32 <= low["rank_of_change"] <= 4 / 32  # of matrices of rank 32
    assert low["optimizer_bytes"] < full["optimizer_bytes"]


def test_a_study(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "CELLS", [script.Cell("lora", LOW)])
    monkeypatch.setattr(script.Cell, "first_rates", (3e-2,))
    monkeypatch.setattr(studies, "RATES", [3e-2])  # so that there are none to try beyond it
    monkeypatch.setattr(sys, "argv", ["relora.py", f"--folder={tmp_path}", "--jobs=1", *tiny])
    script.command_line()
    (row,) = csv.DictReader((tmp_path / "table.csv").open())
    assert row["cell"] == "lora" and row["runs to go"] == "0" and row["rates tried"].startswith("0.03: ")
    trained, parameters = (int(number.replace(",", "")) for number in row["trained"].split(" of "))
    assert trained < parameters and row["rank of the change"].endswith("%")
    assert (tmp_path / "relora.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "lora/lr0.03-seed0").iterdir()} == {
        *("config.yaml", "metrics.jsonl", "summary.json")
    }


def test_the_cells():
    assert len({cell.name for cell in script.CELLS}) == len(script.CELLS) == 7
    assert all(len(cell.first_rates) == 4 for cell in script.CELLS)
