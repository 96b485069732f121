"""What the studies share: runs at tuned learning rates, many at a time, gone on with after an interruption.

A cell of a study is a name and what it overrides. Each cell's learning rate is chosen by one rule, the held-out loss at
the end of whole runs: four rates a factor of about 3 apart, and further ones while the best is at an edge. A finished
run leaves its configuration, metrics and summary in the study's folder; what runs next follows from these alone, so
that an interruption costs the runs that it interrupts, and the same command goes on.
"""

import argparse
import csv
import fcntl
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from nanoT5 import UserError, config, curve, log, main  # noqa: E402

RUNNING = "running"  # folder of the runs that are being made
RATES = [float(f"{digit}e{exponent}") for exponent in range(-7, 3) for digit in (1, 3)]


class Cell:
    """What every study's own class of cells, a frozen dataclass, says of a cell."""

    name: str  # of its folder
    overrides: list[str]
    first_rates: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)  # the first is that of all rates, the others are of the best one
    rate_of: "Cell | None" = None  # whose learning rate it has, instead of one of its own


@dataclass(frozen=True)
class Run:
    study: Path
    cell: Cell
    rate: float
    seed: int

    @property
    def folder(self) -> Path:
        return self.study / self.cell.name / f"lr{self.rate:g}-seed{self.seed}"

    @property
    def summary(self) -> dict | None:
        """What the run came to; None while it is not finished."""
        if not self.folder.exists():
            return None
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {"eval/loss": math.inf}  # diverged

    @property
    def overrides(self) -> list[str]:
        return [*self.cell.overrides, f"optim.base_lr={self.rate}", f"seed={self.seed}"]


Plan = Callable[[Cell], list[Run]]  # a cell's runs, finished or not, as far as is known which are needed
Report = Callable[[Path, list[Cell], Plan], None]  # writes what is finished into the study's folder
Extra = Callable[[Path], dict]  # more for the summary of a run, from its folder before weights are dropped

# ---------------------------------------------------------------------------------------------------------------------
# What to run


def tuning(study: Path, cell: Cell) -> list[Run]:
    """A cell's runs with one seed and different learning rates, as far as those finished show which are needed."""
    rates = list(cell.first_rates)
    while True:
        runs = [Run(study, cell, rate, cell.seeds[0]) for rate in rates]
        if not all(run.summary for run in runs):
            return runs
        lowest = best(runs)
        if lowest.summary["eval/loss"] == math.inf or rates[0] == RATES[0] or rates[-1] == RATES[-1]:
            return runs
        if lowest is runs[0]:
            rates.insert(0, RATES[RATES.index(rates[0]) - 1])
        elif lowest is runs[-1]:
            rates.append(RATES[RATES.index(rates[-1]) + 1])
        else:
            return runs


def best(runs: list[Run]) -> Run:
    return min(runs, key=lambda run: run.summary["eval/loss"])


def needed(study: Path, cell: Cell) -> list[Run]:
    """A cell's runs, finished or not, as far as those finished show which are needed."""
    runs = tuning(study, cell.rate_of or cell)
    if not all(run.summary for run in runs):
        return [] if cell.rate_of else runs
    repeated = [Run(study, cell, best(runs).rate, seed) for seed in cell.seeds]
    return repeated if cell.rate_of else runs + repeated[1:]


# ---------------------------------------------------------------------------------------------------------------------
# Running it


def conduct(plan: Plan, cells: list[Cell], jobs: int, overrides: list[str], report: Report, extra: Extra) -> None:
    """Make all runs that plan(cell) names, `jobs` at a time, earlier cells first."""
    gpus, began, made = torch.cuda.device_count(), time.perf_counter(), 0
    running: dict[int, tuple[Run, subprocess.Popen]] = {}  # by slot
    try:
        while True:
            active = [run for run, _ in running.values()]
            waiting = [run for cell in cells for run in plan(cell) if not run.summary and run not in active]
            for slot in set(range(jobs)) - running.keys():
                if waiting:
                    run = waiting.pop(0)
                    running[slot] = run, start(run, overrides, slot % gpus if gpus else None)
            if not running:
                return
            while all(process.poll() is None for _, process in running.values()):
                time.sleep(0.5)
            ended = [slot for slot, (_, process) in running.items() if process.poll() is not None]
            for slot in sorted(ended, key=lambda slot: failed(running[slot][1])):  # which is an error, and comes last
                run, process = running.pop(slot)
                finish(run, process, extra)
                made += 1
                runs = [run for cell in cells for run in plan(cell)]
                left = sum(not run.summary for run in runs)
                seconds = (time.perf_counter() - began) / made * left
                print(
                    f"{describe(run)} | {len(runs) - left}/{len(runs)} known runs, {log.duration(seconds)} left",
                    flush=True,
                )
                report(run.study, cells, plan)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()


def aside(run: Run) -> Path:
    """Where a run is made: never where one that a killed study left behind may still write."""
    return run.study / RUNNING / f"{run.cell.name}-{run.folder.name}-{os.getpid()}"


def start(run: Run, overrides: list[str], gpu: int | None) -> subprocess.Popen:
    folder = aside(run)
    folder.mkdir(parents=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # sums in the same order however many runs there are at a time
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "nanoT5.main", *overrides, *run.overrides, f"hydra.run.dir='{folder.resolve()}'"]
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def failed(process: subprocess.Popen) -> bool:
    return process.returncode not in (0, main.DIVERGED)


def finish(run: Run, process: subprocess.Popen, extra: Extra) -> None:
    """Keep what the study needs, drop weights and checkpoints."""
    folder, kept = aside(run), ["config.yaml", "metrics.jsonl", "summary.json"]
    if failed(process):
        raise UserError(f"a run failed, and the study with it: see {folder / 'output.txt'}")
    summary = folder / "summary.json"
    if summary.exists():
        summary.write_text(json.dumps(json.loads(summary.read_text()) | extra(folder), indent=1) + "\n")
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(run.folder)


def describe(run: Run) -> str:
    name, loss = f"{run.cell.name}, rate {run.rate:g}, seed {run.seed}", run.summary["eval/loss"]
    if loss == math.inf:
        return f"{name}: diverged"
    escape = curve.shapes(curve.read(run.folder))["training"]["escape"]
    return f"{name}: held-out loss {loss:.3f}, {f'escape at {escape}' if escape else 'no escape'}"


@contextmanager
def locked(study: Path):
    """For this process alone, as long as it lives."""
    folder = os.open(study, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"--folder={study} is being worked on by another study: name another folder") from None
    finally:
        os.close(folder)


def write_table(folder: Path, rows: list[dict]) -> None:
    """table.csv and table.md, a row for each cell."""
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
    (folder / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


# ---------------------------------------------------------------------------------------------------------------------
# The command


def parser(description: str, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of nanoT5.main, for every run")
    parser.add_argument("--folder", type=Path, default=Path("logs", name), help="of the study (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time (default: one for each GPU, else for each CPU core)"
    )
    return parser


def run(
    arguments: argparse.Namespace,
    cells: list[Cell],
    report: Report,
    plan: Callable[[Path, Cell], list[Run]] = needed,
    extra: Extra = lambda folder: {},
) -> None:
    """Make the study in arguments.folder, with a report after every run."""
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UserError(f"--jobs={arguments.jobs}: it has to be a whole number from 1 up")
    for cell in cells:
        own = Run(Path(), cell, 1.0, 0).overrides
        for override in arguments.overrides:
            if override.split("=")[0] in [key.split("=")[0] for key in own]:
                raise UserError(f"{override}: the study sets this key itself")
        config.check(config.load([*arguments.overrides, *own])[0])
    study = arguments.folder
    study.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the runs, as Ctrl-C does
    with locked(study):
        given, note = " ".join(arguments.overrides), study / "overrides.txt"
        if note.exists() and note.read_text() != given:
            raise UserError(
                f"--folder={study} holds a study with the overrides '{note.read_text()}': name another folder"
            )
        note.write_text(given)
        shutil.rmtree(study / RUNNING, ignore_errors=True)
        plan = functools.partial(plan, study)
        jobs = arguments.jobs or torch.cuda.device_count() or os.cpu_count()
        conduct(plan, cells, jobs, arguments.overrides, report, extra)
        report(study, cells, plan)
