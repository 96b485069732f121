"""Two processes on one machine, by torchrun and by accelerate, against one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

from nanoT5 import main

ROOT = Path(main.__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d"]
TORCHRUN += ["--rdzv-endpoint=localhost:0"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

OPTIONS = [
    *("optim.total_steps=8", "optim.batch_size=16", "optim.grad_acc=2", "data.vocab_size=515", "model.num_heads=3"),
    *("optim.weight_decay=0.01", "optim.grad_clip=0.5", "logging.every_steps=1", "eval.every_steps=4", "eval.steps=3"),
    *("checkpoint.every_steps=4", "checkpoint.keep=null"),
]
VARIANTS = {
    "adamwscale": [],
    "lion": ["optim.name=lion", "optim.rms_scale=init"],
    "sophia": ["optim.name=sophia", "optim.rms_scale=true"],
    "adafactor": ["optim.name=adafactor", "optim.rms_scale=false", "optim.grad_clip=0"],
    "transformers": ["model.klass=hf_t5", "data.num_workers=2"],
    "relora": [
        *("relora.rank=4", "relora.every=3", "relora.warm_start_steps=2", "relora.restart_warmup_steps=1"),
        *("relora.reset_optimizer=magnitude", "relora.reset_ratio=0.5", "optim.lr_scheduler=jagged_cosine"),
    ],
    "dirty": ["model.d_ff=49", "data.path={dirty}"],  # and matrices that cannot be cut in two halves
    "small_embedding": ["model.init=small_embedding", "optim.name=adamw"],
}

BROKEN = (4, 11, 22, 31)  # lines of the dirty text
RESUMED = ("lion", "adafactor", "sophia", "relora")


def together(folder: Path, runs: list[list[str]]) -> None:
    """Two processes that make all runs."""
    (folder / "runs.json").write_text(json.dumps(runs))
    done = subprocess.run(
        [*TORCHRUN, ROOT / "tests" / "several_runs.py", folder / "runs.json"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("micro batch") == len(runs)  # one process prints


def metrics(folder: Path, key: str) -> list[float]:
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [event[key] for event in events if key in event]


def tensors(folder: Path, file="model", step=8) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"checkpoints/step-{step}/{file}.safetensors")


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=tolerance, atol=tolerance * a[name].abs().max().item()), name


@pytest.fixture(scope="module")
def folder(tiny, corpus, tmp_path_factory) -> Path:
    """Every variant made by one process, by two with DDP and by two with FSDP2."""
    folder = tmp_path_factory.mktemp("distributed")
    lines = corpus.read_text().splitlines(keepends=True)
    for row in BROKEN:
        lines[row] = "broken\n"
    (folder / "dirty.jsonl").write_text("".join(lines))

    def overrides(parallel: str, name: str) -> list[str]:
        more = [option.format(dirty=folder / "dirty.jsonl") for option in VARIANTS[name]]
        return [*tiny, *OPTIONS, *more, f"parallel={parallel}", f"hydra.run.dir={folder}/{parallel}/{name}"]

    for name in VARIANTS:
        main.run([*overrides("auto", name), f"hydra.run.dir={folder}/one/{name}"])
    together(folder, [overrides(parallel, name) for parallel in ("ddp", "fsdp2") for name in VARIANTS])
    return folder


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", VARIANTS)
def test_two_processes_train_as_one(folder, parallel, name):
    one, two = folder / "one" / name, folder / parallel / name
    for key in ("train/loss", "train/grad_l2", "train/weights_l2", "eval/loss", "eval/accuracy"):
        assert metrics(two, key) == pytest.approx(metrics(one, key), rel=2e-4), key
    for key in ("train/lr", "train/input_tokens", "train/target_tokens"):
        assert metrics(two, key) == metrics(one, key), key
    assert len(metrics(one, "train/loss")) == 8
    assert_close(
        tensors(one), tensors(two), 1e-2 if name in ("lion", "sophia") else 2e-3
    )  # signs of tiny gradients turn
    assert tensors(one, "optimizer").keys() == tensors(two, "optimizer").keys()
    summaries = [json.loads((path / "summary.json").read_text()) for path in (one, two)]
    assert summaries[0]["data"] == summaries[1]["data"] and summaries[1]["processes"] == 2
    faults = [sorted(fault for event in metrics(path, "data/faults") for fault in event) for path in (one, two)]
    assert faults[0] == faults[1] and (name != "dirty" or faults[0])
    alignment = [torch.tensor(summary["eval/alignment"]) for summary in summaries]
    assert torch.allclose(*alignment, atol=1e-3)


def test_any_number_of_processes_goes_on_from_a_checkpoint(folder, tiny, tmp_path):
    """Two of either kind to the bit where the checkpoint is of that kind, one and the other kind to rounding."""
    together(
        tmp_path,
        [
            [
                *(*tiny, *OPTIONS, *VARIANTS[name], f"parallel={parallel}"),
                f"checkpoint.resume={folder}/{start}/{name}/checkpoints/step-4",
                f"hydra.run.dir={tmp_path}/{start}-{parallel}-{name}",
            ]
            for name in RESUMED
            for start, parallel in (("ddp", "ddp"), ("fsdp2", "fsdp2"), ("ddp", "fsdp2"), ("one", "ddp"))
        ],
    )
    for name in RESUMED:
        for same in ("ddp", "fsdp2"):
            resumed, whole = tmp_path / f"{same}-{same}-{name}", folder / same / name
            assert all(torch.equal(a, tensors(whole)[key]) for key, a in tensors(resumed).items())
            assert metrics(resumed, "train/loss") == metrics(whole, "train/loss")
        for start, parallel in (("ddp", "fsdp2"), ("one", "ddp")):
            resumed = tmp_path / f"{start}-{parallel}-{name}"
            assert metrics(resumed, "train/loss") == pytest.approx(
                metrics(folder / "one" / name, "train/loss"), rel=2e-4
            )
        resume = f"checkpoint.resume={folder}/fsdp2/{name}/checkpoints/step-4"
        main.run([*tiny, *OPTIONS, *VARIANTS[name], resume, f"hydra.run.dir={tmp_path}/one-{name}"])
        assert metrics(tmp_path / f"one-{name}", "train/loss") == pytest.approx(
            metrics(folder / "one" / name, "train/loss"), rel=2e-4
        )


@pytest.mark.parametrize(
    "script, more",
    [
        ("sharded_adapters.py", ["parallel=fsdp2", "relora.rank=2"]),
        ("synchronisation.py", ["parallel=ddp"]),
        ("synchronisation.py", ["parallel=fsdp2"]),
    ],
    ids=["adapters are cut up and frozen weights cost nothing", "DDP sends gradients once", "FSDP2 sends them once"],
)
def test_what_a_process_holds_and_sends(tiny, script, more):
    done = subprocess.run(
        [*TORCHRUN, ROOT / "tests" / script, *tiny, *more],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def launch(*command, **options) -> subprocess.Popen:
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for_training(process: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or "train/loss" not in (folder / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.1)


def ranks(process: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "nanoT5.main" in " ".join(child.cmdline())]


LONG = ["optim.total_steps=1000000", "optim.batch_size=16", "logging.every_steps=1", "checkpoint.every_steps=10"]


def test_a_dead_process_ends_the_job(tiny, tmp_path):
    process = launch(*TORCHRUN, "-m", "nanoT5.main", *tiny, *LONG, f"hydra.run.dir={tmp_path}")
    wait_for_training(process, tmp_path)
    started = time.monotonic()
    ranks(process)[1].kill()
    process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - started < 60


def test_sigterm_saves_and_the_same_command_goes_on(tiny, tmp_path):
    """It reaches the processes at different steps, of which they agree on one."""
    command = [*TORCHRUN, "-m", "nanoT5.main", *tiny, *LONG, "parallel=fsdp2", f"hydra.run.dir={tmp_path}"]
    process = launch(*command)
    wait_for_training(process, tmp_path)
    ranks(process)[1].send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert "nanoT5/main.py" not in err, err  # torchrun's own traceback says that processes ended with 130
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"] and (tmp_path / f"checkpoints/step-{summary['step']}").exists()
    options = [*tiny, *LONG, f"optim.total_steps={summary['step'] + 3}", f"hydra.run.dir={tmp_path}"]
    again = main.run(options)
    assert again["step"] == summary["step"] + 3 and not again["interrupted"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accelerate_launch(tiny, tmp_path, kind):
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes=2"]
    accelerate += [f"--config_file={ROOT}/configs/accelerate/{kind}.yaml", "--main_process_port=0"]
    process = launch(*accelerate, "-m", "nanoT5.main", *tiny, f"hydra.run.dir={tmp_path}")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert f"2 processes with {kind}" in out


def test_what_processes_cannot_share_out_is_one_sentence(tiny, tmp_path):
    process = launch(*TORCHRUN, "-m", "nanoT5.main", *tiny, "data.streams=3", f"hydra.run.dir={tmp_path}")
    out, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert err.count("data.streams=3 by their number") == 1 and "nanoT5.UserError" not in err
