"""Trackers that write to this machine, read back with their own libraries."""

import subprocess
import sys

import pytest

from nanoT5 import UserError, curve, log, main, trackers


def test_tensorboard_has_what_metrics_have(tiny, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    main.run([*tiny, "logging.trackers=[tensorboard]", "logging.every_steps=2", f"hydra.run.dir={tmp_path}"])
    read = EventAccumulator(str(tmp_path / "nanoT5"))
    read.Reload()
    for key in ("train/loss", "train/lr", "train/grad_l2", "eval/loss", "eval/accuracy", "data/unigram_entropy"):
        steps, values = curve.series(curve.read(tmp_path), key)
        assert [event.step for event in read.Scalars(key)] == steps
        assert [event.value for event in read.Scalars(key)] == pytest.approx(values, rel=1e-6)
    assert read.Scalars("summary/eval/loss")[0].value == pytest.approx(values_of(tmp_path, "eval/loss")[-1], rel=1e-6)
    picture = read.Images("curve")[0]
    assert picture.encoded_image_string.startswith(b"\x89PNG") and picture.width > picture.height > 100
    assert "optim.base_lr: None" in "".join(p.read_text() for p in tmp_path.rglob("hparams.yml"))


def values_of(folder, key: str) -> list:
    return curve.series(curve.read(folder), key)[1]


def test_an_offline_mlflow_has_what_metrics_have(tiny, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    address = f"file://{tmp_path / 'store'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    main.run([*tiny, "logging.trackers=[mlflow]", "logging.every_steps=2", f"hydra.run.dir={tmp_path / 'run'}"])
    client = MlflowClient(tracking_uri=address)
    (run,) = client.search_runs([client.get_experiment_by_name("nanoT5").experiment_id])
    assert run.info.run_name == "run" and run.data.params["optim.name"] == "adamwscale"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.value for point in sorted(history, key=lambda point: point.step)] == pytest.approx(
        values_of(tmp_path / "run", "train/loss")
    )
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["curve.png"]
    diverging = ["optim.base_lr=3e38", "optim.warmup_steps=0", "optim.grad_clip=0", "optim.total_steps=50"]
    for name in ("diverged", "again"):  # each is closed for the next one
        with pytest.raises(log.Diverged):
            main.run([*tiny, *diverging, "logging.trackers=[mlflow]", f"hydra.run.dir={tmp_path / name}"])


def test_a_tracker_that_is_not_installed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(UserError, match="pip install wandb"):
        main.run([*tiny, "logging.trackers=[tensorboard,wandb]", f"hydra.run.dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match="logging.trackers=.* a list of"):
        main.run([*tiny, "logging.trackers=[paper]", f"hydra.run.dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_none_is_imported_unless_named():
    code = "import sys, nanoT5.main; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "accelerate" in loaded and not {"tensorboard", "wandb", "mlflow", "trackio", "aim"} & {*loaded}


def test_only_numbers_are_told():
    event = {"a": 1, "b": 0.5, "c": [1.0], "d": "word", "e": True, "f": None}
    assert trackers.numbers(event) == {"a": 1, "b": 0.5}
