"""Going on after whatever ended a run, to the bit."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hub
import kill_runs
import pytest
import safetensors.torch

from nanoT5 import UserError, checkpoint, data, main, optim

OPTIONS = [
    *("optim.total_steps=24", "optim.grad_acc=2", "model.dropout_rate=0.1", "checkpoint.every_steps=4"),
    *("eval.every_steps=6", "eval.steps=1", "logging.every_steps=3"),
]


def same(alone: Path, other: Path, step: int) -> bool:
    return kill_runs.outcome(alone, step) == kill_runs.outcome(other, step)


@pytest.mark.parametrize(
    "kills, more",
    [
        (7, ["data.num_workers=2", "model.dropout_rate=0.1"]),
        (7, ["optim.name=sophia", "optim.grad_acc=2"]),
        (4, ["--processes=2", "parallel=fsdp2"]),
        (2, ["data=c4", "data.streams=2", "data.num_workers=1"]),
    ],
    ids=["workers", "sophia", "two processes", "hub"],
)
def test_a_run_killed_at_random_moments_is_the_same_to_the_bit(tiny, c4, tmp_path, kills, more):
    text = [option for option in tiny if option.startswith("data")]
    if "data=c4" in more:
        text = [option for option in text if not option.startswith(("data=", "data.path="))]
    command = [sys.executable, kill_runs.__file__, f"--kills={kills}", *text, *more]
    with hub.serving(c4) as (address, _):
        environment = os.environ | {"TMPDIR": str(tmp_path), "HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and f"killed {kills} times: the same" in done.stdout, done.stdout + done.stderr


def in_child(function) -> int:
    """Run a function in a forked process; the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(77)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def kill_me(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def nth_time(n: int, function, monkeypatch, owner, name: str) -> None:
    """Replace owner.name such that its n-th call is `function`, and the others what they were."""
    original, calls = getattr(owner, name), []

    def counted(*arguments, **keywords):
        calls.append(1)
        return (function if len(calls) == n else original)(*arguments, **keywords)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize(
    "owner, name, n",
    [
        (safetensors.torch, "save_file", 3),  # a checkpoint without any file
        (safetensors.torch, "save_file", 4),  # with weights, but no optimizer state
        (Path, "rename", 2),  # with everything, not yet moved
        (shutil, "rmtree", 9),  # before the third one is made
        (main.Evaluator, "__call__", 3),
        (main.checkpoint, "export", 1),  # after the last checkpoint
        (main.log, "write_summary", 1),
    ],
)
def test_a_run_killed_at_a_chosen_moment_is_the_same_to_the_bit(tiny, tmp_path, monkeypatch, owner, name, n):
    main.run([*tiny, *OPTIONS, f"hydra.run.dir={tmp_path}/alone"])
    again = [*tiny, *OPTIONS, f"hydra.run.dir={tmp_path}/killed"]
    with monkeypatch.context() as patch:
        nth_time(n, kill_me, patch, owner, name)
        assert in_child(lambda: main.run(again)) == signal.SIGKILL
    main.run(again)
    assert same(tmp_path / "alone", tmp_path / "killed", 24)
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {
        path.name for path in (tmp_path / "alone").iterdir()
    }
    assert [path.name for path in checkpoint.found(tmp_path / "killed/checkpoints")] == ["step-24", "step-20"]


def test_a_data_worker_never_outlives_a_training_process_that_is_killed_at_once(tiny, tmp_path, monkeypatch):
    begin, note = data.begin_worker, tmp_path / "worker"

    def orphaned(worker):
        note.write_text(str(os.getpid()))
        training = os.getppid()
        os.kill(training, signal.SIGKILL)
        while os.getppid() == training:
            time.sleep(0.01)
        begin(worker)

    monkeypatch.setattr(data, "begin_worker", orphaned)
    options = [*tiny, "data.num_workers=1", f"hydra.run.dir={tmp_path / 'run'}"]
    assert in_child(lambda: main.run(options)) == signal.SIGKILL
    worker, deadline = int(note.read_text()), time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    left = Path(f"/proc/{worker}").exists()
    if left:
        os.kill(worker, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_bit_after_an_interruption(tiny, tmp_path, monkeypatch, name):
    """Of SIGTERM, between two log events, twice."""
    options = [*tiny, *OPTIONS, f"optim.name={name}", "optim.rms_scale=init"]
    main.run([*options, f"hydra.run.dir={tmp_path}/alone"])
    for stop in (7, 14):
        with monkeypatch.context() as patch:
            step = main.Step.__call__

            def interrupted(self, batch, lr, number, step=step, stop=stop):
                if number == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                return step(self, batch, lr, number)

            patch.setattr(main.Step, "__call__", interrupted)
            summary = main.run([*options, f"hydra.run.dir={tmp_path}/stopped"])
            assert summary["interrupted"] and summary["step"] == stop + 1
    assert not main.run([*options, f"hydra.run.dir={tmp_path}/stopped"])["interrupted"]
    assert same(tmp_path / "alone", tmp_path / "stopped", 24)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    main.run([*tiny, *OPTIONS, "checkpoint.keep=null", f"hydra.run.dir={folder}"])
    return folder


@pytest.fixture
def partial(whole, tmp_path) -> Path:
    """What a run would have left that was killed after step 12."""
    folder = tmp_path / "partial"
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    for step in (16, 20, 24):
        shutil.rmtree(folder / f"checkpoints/step-{step}")
    return folder


def test_all_checkpoints_are_kept_if_asked_for(whole):
    assert [path.name for path in checkpoint.found(whole / "checkpoints")] == [f"step-{n}" for n in range(24, 0, -4)]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut off", "changed", "gone"])
def test_a_damaged_checkpoint_is_passed_over(tiny, whole, partial, capsys, file, damage):
    path = partial / "checkpoints/step-12" / file
    content = path.read_bytes()
    at = content.rindex(b"1") if file == "state.json" else -9  # a digit there: what is read still makes sense
    changed = {"cut off": content[: len(content) // 2], "changed": bytearray(content), "gone": b""}
    changed["changed"][at] ^= 2
    path.write_bytes(changed[damage])
    if damage == "gone":
        path.unlink()
    main.run([*tiny, *OPTIONS, "checkpoint.keep=null", f"hydra.run.dir={partial}"])
    out = capsys.readouterr().out
    assert "step-12 is damaged" in out and "on from " in out and "step-8" in out
    assert same(whole, partial, 24)


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(tiny, partial):
    for path in checkpoint.found(partial / "checkpoints"):
        (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in .* is whole"):
        main.run([*tiny, *OPTIONS, f"hydra.run.dir={partial}"])


def test_half_a_line_of_the_metrics_is_no_event(tiny, whole, partial):
    """As a full disk leaves it."""
    with (partial / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 12, "tra')
    main.run([*tiny, *OPTIONS, "checkpoint.keep=null", f"hydra.run.dir={partial}"])
    assert same(whole, partial, 24)


@pytest.mark.parametrize("given", ["partial", "partial/checkpoints/step-8", "step-8"])
def test_another_folder_goes_on_from_a_run(tiny, whole, partial, tmp_path, given):
    if given == "step-8":  # a copy of a checkpoint alone, without the metrics before it
        shutil.copytree(partial / "checkpoints/step-8", tmp_path / given)
    main.run([*tiny, *OPTIONS, f"checkpoint.resume={tmp_path / given}", f"hydra.run.dir={tmp_path}/other"])
    (tensors, metrics), (other, others) = (kill_runs.outcome(path, 24) for path in (whole, tmp_path / "other"))
    assert tensors == other
    assert (metrics[-len(others) + 1 :] == others[1:]) if given == "step-8" else metrics == others


def test_a_run_is_not_gone_on_with_from_its_own_past(tiny, partial):
    """It goes on from its newest checkpoint, so that the same command can be given again."""
    with pytest.raises(UserError, match="is of the run folder itself"):
        main.run([*tiny, *OPTIONS, f"checkpoint.resume={partial}/checkpoints/step-4", f"hydra.run.dir={partial}"])


def test_a_run_that_was_stopped_and_then_killed_at_its_end_is_finished(tiny, whole, tmp_path, monkeypatch):
    options = [*tiny, *OPTIONS, "checkpoint.keep=null", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main.run([*options, "max_hours=1e-9"])["interrupted"]
    with monkeypatch.context() as patch:
        nth_time(1, kill_me, patch, main.log, "write_summary")
        assert in_child(lambda: main.run(options)) == signal.SIGKILL
    assert not main.run(options)["interrupted"]
    assert same(whole, tmp_path / "run", 24)


def test_the_checkpoint_just_written_is_kept_however_many_damaged_ones_are_ahead(tiny, whole, partial):
    for step in (16, 24):
        shutil.copytree(whole / "checkpoints/step-4", partial / f"checkpoints/step-{step}")
        (partial / f"checkpoints/step-{step}/model.safetensors").write_bytes(b"")
    options = ["checkpoint.keep=1", "max_hours=1e-9"]
    assert main.run([*tiny, *OPTIONS, *options, f"hydra.run.dir={partial}"])["step"] == 13
    left = [path.name for path in checkpoint.found(partial / "checkpoints")]
    assert left == ["step-24", "step-16", "step-13"]


def test_a_run_whose_checkpoints_were_removed_is_not_trained_over(tiny, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(UserError, match="already holds a run"):
        main.run([*tiny, *OPTIONS, f"hydra.run.dir={tmp_path}/run"])


def test_other_folders_beside_the_checkpoints_are_left_alone(tiny, partial):
    for name in ("step-8-good", ".writing-3"):
        shutil.copytree(partial / "checkpoints/step-8", partial / "checkpoints" / name)
    main.run([*tiny, *OPTIONS, f"hydra.run.dir={partial}"])
    left = {path.name for path in (partial / "checkpoints").iterdir()}
    assert left == {"step-20", "step-24", "step-8-good"}


def test_a_full_disk_leaves_the_checkpoint_before_it_whole(tiny, whole, partial, tmp_path):
    sentence = tmp_path / "sentence"

    def limited():
        largest = max(path.stat().st_size for path in (partial / "checkpoints/step-12").iterdir())
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1000, largest - 1000))
        try:
            main.run([*tiny, *OPTIONS, f"hydra.run.dir={partial}"])
        except UserError as error:
            sentence.write_text(str(error))

    in_child(limited)
    words = sentence.read_text()
    assert "checkpoint of step 16 could not be written" in words and "make room" in words
    assert words.endswith("goes on from " + str(partial / "checkpoints/step-12"))
    assert [path.name for path in (partial / "checkpoints").iterdir() if path.name.startswith(".")] == []
    main.run([*tiny, *OPTIONS, f"hydra.run.dir={partial}"])
    assert same(whole, partial, 24)


@pytest.mark.parametrize(
    "change, word",
    [
        ("model.d_ff=16", "model.d_ff=48 there, 16 here"),
        ("data.vocab_size=500", "data.vocab_size=512 there, 500 here"),
        ("data.streams=2", "data.streams=4 there, 2 here"),
        ("optim.name=lion", "optim.name=adamwscale there, lion here"),
        ("seed=1", "seed=0 there, 1 here"),
    ],
)
def test_a_change_of_model_data_or_optimizer_is_refused(tiny, partial, change, word):
    files = [partial / "metrics.jsonl", partial / "config.yaml"]
    before = [file.read_text() for file in files]
    with pytest.raises(UserError, match=word):
        main.run([*tiny, *OPTIONS, change, f"hydra.run.dir={partial}"])
    assert [file.read_text() for file in files] == before


def test_other_text_at_the_same_path_is_refused(tiny, partial, corpus, tmp_path):
    other = tmp_path / corpus.name
    other.write_text(corpus.read_text() + json.dumps({"text": "One more document."}) + "\n")
    tokenizer = [f"data.tokenizer={partial / 'model'}"]
    folder = tmp_path / "first"
    for path, total in ((corpus, 8), (other, 12)):
        shutil.copy(path, tmp_path / "corpus.jsonl")
        options = [*tiny, *tokenizer, f"data.path={tmp_path}/corpus.jsonl", f"optim.total_steps={total}"]
        if path == other:
            with pytest.raises(UserError, match="the text or the tokenizer is another one"):
                main.run([*options, f"hydra.run.dir={folder}"])
            options.append("checkpoint.force=true")
        assert main.run([*options, f"hydra.run.dir={folder}"])["step"] == total


def test_other_changes_are_named_and_more_steps_are_none(tiny, partial, capsys):
    more = ["optim.total_steps=30", "eval.every_steps=5", "optim.base_lr=1e-3"]
    summary = main.run([*tiny, *OPTIONS, *more, f"hydra.run.dir={partial}"])
    out = capsys.readouterr().out
    assert summary["step"] == 30 and "optim.base_lr=None there, 0.001 here" in out
    assert "total_steps" not in out and "every_steps" not in out


def test_two_runs_at_once_in_one_folder_are_refused(tiny, partial):
    locked = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", locked, partial / "config.yaml"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(UserError, match="already holds a run"):
            main.run([*tiny, *OPTIONS, f"hydra.run.dir={partial}"])
        other.communicate(b"\n")
