import re
import sys
from pathlib import Path

import plot
import pytest

from nanoT5 import UserError, curve

ASSETS = Path(__file__).parent.parent / "assets" / "hump"
RUNS = [ASSETS / "adamw-scaled-hf" / "lr0.03-seed0", ASSETS / "adamw-plain-hf" / "lr0.003-seed0"]


def test_a_figure_of_any_runs_in_any_format(tmp_path, monkeypatch, capsys):
    targets = [tmp_path / f"figure.{ending}" for ending in ("png", "svg", "pdf")]
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, RUNS), "--table", "--to", *map(str, targets)])
    plot.command_line()
    assert [path.read_bytes()[:4] for path in targets] == [b"\x89PNG", b"<?xm", b"%PDF"]
    said = capsys.readouterr().out
    losses = [curve.series(curve.read(run), "eval/loss")[1][-1] for run in RUNS]
    assert f"| {losses[0]:.4f} |" in said and f"| {losses[1]:.4f} ({losses[1] - losses[0]:+.4f}) |" in said
    assert re.search(r"optim.rms_scale=True \|.*\| 456 \|", said) and "seed=" not in said  # it is the same for both


def test_places_of_events_in_steps_tokens_and_seconds():
    events = [
        {
            "step": step,
            "train/tokens_per_second": speed,
            "train/input_tokens": 80 * step,
            "train/target_tokens": 20 * step,
        }
        for step, speed in ((10, 100.0), (20, 50.0))
    ]
    assert curve.places(events) == ([10, 20], ([10, 20], [1000, 2000], [10.0, 30.0]))


def test_runs_are_found_in_the_order_named(tmp_path):
    assert plot.below([RUNS[1], ASSETS / "adamw-scaled-hf"])[0] == RUNS[1]
    assert plot.below([RUNS[0], RUNS[0]]) == RUNS[:1]
    with pytest.raises(UserError, match="no run in or below"):
        plot.below([tmp_path])


def test_another_ending_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plot.py", str(RUNS[0]), "--to", "figure.doc"])
    with pytest.raises(UserError, match="name a .png"):
        plot.command_line()
