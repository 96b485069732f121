"""Kill a run at random moments, go on, and compare: python scripts/kill_runs.py [--kills 100] [key=value ...]

One run is left alone. Another one with the same configuration is killed (SIGKILL) again and again, while it loads, in
the middle of a step, of an evaluation or of writing a checkpoint, each time goes on by the same command, and in the end
has to have the same weights, optimizer state and metrics, to the bit. Exit status 1 and a sentence if it has not.
With --processes=2 a run is two processes, which are killed together.
"""

import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoT5 import script  # noqa: E402

TINY = [  # a run of some seconds, much of it evaluations and checkpoints
    *("model.d_model=32", "model.d_kv=8", "model.d_ff=48", "model.num_layers=2", "model.num_decoder_layers=2"),
    *("data.input_length=32", "data.shuffle_block=16", "optim.batch_size=8", "optim.warmup_steps=20"),
    *("eval.every_steps=7", "eval.steps=1", "eval.batch_size=8", "checkpoint.every_steps=5", "logging.every_steps=3"),
    *("device=cpu", "precision=fp32"),
]
TIMES = ("train/tokens_per_second", "train/data_wait")  # what differs between two runs that do the same


def life(overrides: list[str], distributed: dict[str, str]) -> None:
    """In a process of its own: the run from where it is to its end; distributed: what torchrun would tell it."""
    import torch

    from nanoT5 import main

    multiprocessing.set_start_method("fork", force=True)  # so that data workers notice that their parent is gone
    os.environ.update(distributed)
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    main.run(overrides)


def outcome(folder: Path, step: int) -> tuple[dict[str, bytes], list[dict]]:
    """All that has to be the same: the last checkpoint's tensors and the metrics."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tensors = {path.name: path.read_bytes() for path in (folder / f"checkpoints/step-{step}").glob("*.safetensors")}
    return tensors, [{key: value for key, value in event.items() if key not in TIMES} for event in events]


def compare(kills: int, seed: int, processes: int, overrides: list[str], work: Path) -> None:
    """Raises SystemExit with a sentence where a run that was killed comes to something else."""
    context = multiprocessing.get_context("forkserver")  # which imports torch once
    context.set_forkserver_preload(["nanoT5.main"])
    rng, lines = random.Random(seed), [*TINY, f"optim.total_steps={15 * kills}", *overrides]

    def begin(name: str) -> list:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
            where["OMP_NUM_THREADS"] = 1
        ranks = []
        for rank in range(processes):
            told = {key: str(value) for key, value in (where | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            overrides = [*lines, f"hydra.run.dir={work / name}"]
            ranks.append(context.Process(target=life, args=(overrides, told if processes > 1 else {})))
            ranks[-1].start()
        return ranks

    def wait(process, metrics: Path, before: int | None) -> None:
        """Until the run has loaded: it begins by writing its metrics anew, as another file than `before`."""
        while process.is_alive() and (not metrics.exists() or metrics.stat().st_ino == before):
            time.sleep(0.005)

    ranks = begin("alone")
    wait(ranks[0], work / "alone/metrics.jsonl", None)
    began = time.perf_counter()
    for process in ranks:
        process.join()
        if process.exitcode:
            sys.exit("the run that was left alone failed")
    seconds = time.perf_counter() - began
    step = json.loads((work / "alone/summary.json").read_text())["step"]

    metrics, done = work / "killed/metrics.jsonl", 0
    while True:
        before, began = metrics.stat().st_ino if metrics.exists() else None, time.perf_counter()
        ranks = begin("killed")
        process = ranks[0]
        if done < kills:
            if rng.random() < 0.9:  # else perhaps while it is still loading
                wait(process, metrics, before)
            process.join(rng.random() * seconds / kills)
            if process.is_alive():
                done += 1
                for rank in ranks:
                    rank.kill()
        for rank in ranks:
            rank.join()
        events = metrics.read_text().splitlines() if metrics.exists() else []
        reached = json.loads(events[-1])["step"] if events else 0
        print(f"kill {done}, after {time.perf_counter() - began:.2f} s, near step {reached}", flush=True)
        if process.exitcode == 0:
            break
        if process.exitcode != -9:
            sys.exit(f"a run that went on failed: see {work / 'killed'}")
    tensors, events = (list(pair) for pair in zip(outcome(work / "alone", step), outcome(work / "killed", step)))
    if tensors[0] != tensors[1]:
        sys.exit("the weights or the optimizer state differ")
    for a, b in zip(*events):
        if a != b:
            sys.exit(f"the metrics differ: {a} against {b}")
    if len(events[0]) != len(events[1]):
        sys.exit("one of them has more metrics")
    if done < kills:
        sys.exit(f"the run had ended after {done} kills: give it more steps")
    print(f"killed {done} times: the same weights, optimizer state and {len(events[0])} log events, to the bit")


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of nanoT5.main, for either run")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--processes", type=int, default=1, help="of a run")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as work:
        compare(arguments.kills, arguments.seed, arguments.processes, arguments.overrides, Path(work))


if __name__ == "__main__":
    script(command_line)
