"""The study's plan, and a small study run for real."""

import csv
import fcntl
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import hump
import pytest
import study as studies

from nanoT5 import UserError

CELL = hump.Cell("adamw", False, "hf")  # a headline cell, whose first rates are 3e-4 to 1e-2


def leave(run, loss: float) -> None:
    run.folder.mkdir(parents=True)
    if loss < math.inf:
        (run.folder / "summary.json").write_text(json.dumps({"eval/loss": loss}))


def made(study: Path, cell, loss_of_rate) -> list[float]:
    """The rates that the plan asks for until it is satisfied, each run done as soon as it is asked for."""
    rates = []
    while waiting := [run for run in studies.needed(study, cell) if not run.summary]:
        rates.append(waiting[0].rate)
        leave(waiting[0], loss_of_rate(waiting[0].rate))
    return rates


def distance(best: float):
    return lambda rate: 3 + abs(math.log(rate / best))


@pytest.mark.parametrize(
    "best, rates",
    [
        (1e-3, [3e-4, 1e-3, 3e-3, 1e-2, 1e-3, 1e-3]),
        (1e-4, [3e-4, 1e-3, 3e-3, 1e-2, 1e-4, 3e-5, 1e-4, 1e-4]),
        (3e-2, [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-2, 3e-2]),
    ],
)
def test_rates_are_added_until_the_best_has_a_worse_one_on_either_side(tmp_path, best, rates):
    """Then two more seeds at the best."""
    assert made(tmp_path, CELL, distance(best)) == rates
    assert [run.seed for run in studies.needed(tmp_path, CELL) if run.rate == best] == [0, 1, 2]


def test_a_rate_that_diverges_is_the_worst(tmp_path):
    rates = made(tmp_path, CELL, lambda rate: math.inf if rate > 1e-3 else distance(1e-3)(rate))
    assert rates == [3e-4, 1e-3, 3e-3, 1e-2, 1e-3, 1e-3]


def test_the_blind_reference_waits_for_its_rate(tmp_path):
    sighted, blind = hump.Cell("adamw", True, "hf"), hump.Cell("adamw", True, "hf", blind=True)
    assert studies.needed(tmp_path, blind) == []
    made(tmp_path, sighted, distance(3e-2))
    (run,) = studies.needed(tmp_path, blind)
    assert (run.rate, run.seed) == (3e-2, 0) and "model.blind_encoder=true" in run.overrides


def test_the_grid():
    assert len(set(hump.GRID)) == len(hump.GRID) == 4 + 1 + 8 + 2
    for cell in hump.GRID:
        rates = cell.first_rates
        places = [studies.RATES.index(rate) for rate in rates]
        assert len(rates) == 4 and places == list(range(places[0], places[0] + 4))


@pytest.fixture
def quick(tmp_path, tiny, monkeypatch):
    """A function that runs `scripts/hump.py --quick` on runs of seconds, and its folder."""
    table = tmp_path / "table.csv"
    with table.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["cell", "rate"])
        writer.writerows([cell.name, 1e-2] for cell in hump.HEADLINE)
    monkeypatch.setattr(hump, "CHOSEN", table)
    study = tmp_path / "study"

    def run(*more: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["hump.py", "--quick", "--jobs=2", f"--folder={study}", *tiny, *more])
        hump.command_line()
        return study

    return run


def test_a_study_is_run_reported_drawn_and_gone_on_with(quick, capsys, monkeypatch):
    study = quick()
    runs = sorted(path.parent for path in study.rglob("metrics.jsonl"))
    assert [str(folder.relative_to(study)) for folder in runs] == sorted(
        f"{cell.name}/lr0.01-seed0" for cell in hump.HEADLINE
    )
    assert {path.name for path in runs[0].iterdir()} == {"config.yaml", "metrics.jsonl", "summary.json"}
    rows = list(csv.DictReader((study / "table.csv").open()))
    losses = [json.loads((study / row["cell"] / "lr0.01-seed0/summary.json").read_text())["eval/loss"] for row in rows]
    assert [row["held-out loss"] for row in rows] == [f"{loss:.3f}" for loss in losses] and len(set(losses)) == 4
    assert (study / "hump.png").read_bytes().startswith(b"\x89PNG")
    assert "4/4 known runs" in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", ["hump.py", "--plot", str(study)])
    monkeypatch.chdir(study)
    hump.command_line()
    assert (study / "plot.png").read_bytes().startswith(b"\x89PNG")

    # one is lost: it alone is made again, with the same result
    lost, kept = runs[0], (runs[1] / "metrics.jsonl").stat().st_mtime_ns
    before = json.loads((lost / "summary.json").read_text())["eval/loss"]
    lost.rename(study / "running" / "left over by an interruption")
    quick()
    assert json.loads((lost / "summary.json").read_text())["eval/loss"] == before
    assert (runs[1] / "metrics.jsonl").stat().st_mtime_ns == kept

    with pytest.raises(UserError, match="with the overrides .* name another folder"):
        quick("optim.weight_decay=0.1")


def test_mistakes_are_refused_before_anything_runs(quick, tmp_path):
    with pytest.raises(UserError, match="--jobs=0"):
        quick("--jobs=0")
    with pytest.raises(UserError, match="seed=3: the study sets this key itself"):
        quick("seed=3")
    study = tmp_path / "study"
    assert not study.exists()
    study.mkdir()
    other = os.open(study, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another study"):
        quick()
    os.close(other)


def test_where_a_curve_passes_the_decoder_alone():
    events = [{"step": 0, "other": 1.0}, *({"step": 100 * i, "eval/loss": 5.0 - i} for i in range(1, 4))]
    assert [hump.passes(events, alone) for alone in ([3.5], [3.5, 2.5], [1.0], [])] == [
        "200",
        "300",
        "never",
        "unknown",
    ]


def test_a_run_that_fails_ends_the_study_and_one_that_ended_with_it_is_kept(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(hump, "HEADLINE", hump.HEADLINE[:2])
    start, poll = studies.start, subprocess.Popen.poll

    def broken_first(run, overrides, gpu):
        return start(run, [*overrides, *(["data.path=/nowhere"] if run.cell == hump.HEADLINE[0] else [])], gpu)

    def poll_late(process):  # both have ended when the study looks
        process.wait()
        return poll(process)

    monkeypatch.setattr(studies, "start", broken_first)
    monkeypatch.setattr(subprocess.Popen, "poll", poll_late)
    with pytest.raises(UserError, match="output.txt"):
        quick()
    assert [path.parent.parent.name for path in (tmp_path / "study").rglob("adamw*/*/summary.json")] == [
        hump.HEADLINE[1].name
    ]


def test_a_run_that_diverges_does_not(quick, monkeypatch, capsys):
    monkeypatch.setattr(hump, "HEADLINE", hump.HEADLINE[:1])
    monkeypatch.setattr(hump, "at_chosen_rate", lambda study, cell: [studies.Run(study, cell, 3e38, 0)])
    quick("optim.warmup_steps=0", "optim.grad_clip=0", "optim.total_steps=50", "logging.every_steps=50")
    assert "seed 0: diverged" in capsys.readouterr().out


def test_an_interrupted_study_ends_its_runs(tiny, tmp_path):
    script = Path(hump.__file__)
    study = tmp_path / "study"
    command = [
        sys.executable,
        script,
        f"--folder={study}",
        "--jobs=1",
        *tiny,
        "optim.total_steps=1000000",
        "logging.every_steps=1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not any("train/loss" in path.read_text() for path in study.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "", err
    (run,) = (study / "running").iterdir()
    assert json.loads((run / "summary.json").read_text())["interrupted"]
