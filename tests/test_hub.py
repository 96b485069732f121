"""Data sets on the Hub, served on loopback in the shape of C4, through the command that a user types."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hub
import pytest

from nanoT5 import main

ROOT = Path(main.__file__).parent.parent


def run(tiny, address: str, home: Path, *overrides: str) -> subprocess.CompletedProcess:
    options = [option for option in tiny if not option.startswith(("data=", "data.path=", "data.streams="))]
    return subprocess.run(
        [sys.executable, "-m", "nanoT5.main", *options, "data=c4", "data.streams=2", *overrides],
        cwd=ROOT,
        env=os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_c4(c4, tiny, tmp_path, documents, monkeypatch):
    """Trains, with workers too; reads no more files than it needs; evaluates on the validation split; resumes."""
    with hub.serving(c4) as (address, requests):
        for name, more in (("a", []), ("b", ["data.num_workers=2"])):
            done = run(tiny, address, tmp_path, f"hydra.run.dir={tmp_path / name}", "checkpoint.every_steps=3", *more)
            assert done.returncode == 0, done.stderr
        read = {path for path in requests if re.search(r"resolve/.*\.gz$", path)}
        assert sum("validation" in path for path in read) == 2
        monkeypatch.setattr(hub, "COMMIT", hub.COMMIT[::-1])  # as after an edit of the README
        resume = f"checkpoint.resume={tmp_path}/a/checkpoints/step-3"
        done = run(tiny, address, tmp_path, f"hydra.run.dir={tmp_path / 'c'}", resume)
        assert done.returncode == 0, done.stderr
    a, b, c = (json.loads((tmp_path / name / "summary.json").read_text()) for name in "abc")
    assert a["eval/loss"] == b["eval/loss"] == c["eval/loss"]
    assert a["corpus"][0]["files"] == 32 and hub.COMMIT in c["corpus"][0]["first"] != a["corpus"][0]["first"]
    assert a["held_out"]["sequences"] == 16 and a["held_out"]["tokens"] >= 16 * 34


@pytest.mark.parametrize(
    "override, words",
    [
        ("data.name=allenai/nothing", ["data.name=allenai/nothing", "cannot be had"]),
        ("data.config=xx", ["data.config=xx", "en"]),
    ],
)
def test_a_data_set_that_is_not_there(c4, tiny, tmp_path, override, words):
    with hub.serving(c4) as (address, _):
        done = run(tiny, address, tmp_path, f"hydra.run.dir={tmp_path / 'run'}", override)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr
