"""The study: with which optimizer, RMS scaling and initialization does T5 leave the plateau?

    python scripts/hump.py                        # the whole grid: 5 to 6 hours on two CPU cores
    python scripts/hump.py --quick                # AdamW without and with RMS scaling, two initializations: 20 minutes
    python scripts/hump.py model=small optim.batch_size=256    # the same with other overrides of nanoT5.main
    python scripts/hump.py --plot FOLDER ...      # one figure of any runs

A cell of the grid is an optimizer, RMS scaling or none, and an initialization. Each cell's learning rate is chosen by
one rule, the held-out loss at the end of whole runs: four rates a factor of about 3 apart, and further ones while the
best is at an edge. The headline cells are then repeated with two more seeds. A finished run leaves its configuration,
metrics and summary in the study's folder; what runs next follows from these alone, so that an interruption costs the
runs that it interrupts, and the same command goes on.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from nanoT5 import UserError, config, curve, log, main  # noqa: E402

CHOSEN = ROOT / "assets" / "hump" / "table.csv"  # where --quick finds its learning rates
RUNNING = "running"  # folder of the runs that are being made
SEEDS = (0, 1, 2)  # of the headline cells; the others have the first alone
RATES = [float(f"{digit}e{exponent}") for exponent in range(-7, 3) for digit in (1, 3)]
FIRST_RATES = {  # of an optimizer without and with RMS scaling
    ("adamw", False): (3e-4, 1e-3, 3e-3, 1e-2),
    ("adamw", True): (1e-2, 3e-2, 1e-1, 3e-1),
    ("lion", False): (1e-4, 3e-4, 1e-3, 3e-3),
    ("lion", True): (1e-3, 3e-3, 1e-2, 3e-2),
    ("sophia", False): (3e-4, 1e-3, 3e-3, 1e-2),
    ("sophia", True): (1e-3, 3e-3, 1e-2, 3e-2),
    ("adafactor", True): (1e-2, 3e-2, 1e-1, 3e-1),
}


@dataclass(frozen=True)
class Cell:
    optimizer: str
    scaled: bool  # by RMS
    init: str
    blind: bool = False  # a reference without the encoder, at the learning rate of the cell that has one

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{'scaled' if self.scaled else 'plain'}-{self.init}{'-blind' if self.blind else ''}"

    @property
    def seeds(self) -> tuple[int, ...]:
        return SEEDS if self in HEADLINE else SEEDS[:1]


HEADLINE = [Cell("adamw", scaled, init) for init in ("hf", "uniform") for scaled in (False, True)]
GRID = [
    *HEADLINE,
    Cell("adamw", True, "hf", blind=True),
    *(
        Cell(name, scaled, init)
        for init in ("hf", "uniform")
        for name in ("lion", "sophia")
        for scaled in (False, True)
    ),
    *(Cell("adafactor", True, init) for init in ("hf", "uniform")),
]


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
        return [
            f"optim.name={self.cell.optimizer}",
            f"optim.rms_scale={str(self.cell.scaled).lower()}",
            f"model.init={self.cell.init}",
            f"model.blind_encoder={str(self.cell.blind).lower()}",
            f"optim.base_lr={self.rate}",
            f"seed={self.seed}",
        ]


# ---------------------------------------------------------------------------------------------------------------------
# What to run


def tuning(study: Path, cell: Cell) -> list[Run]:
    """A cell's runs with one seed and different learning rates, as far as those finished show which are needed."""
    rates = list(FIRST_RATES[cell.optimizer, cell.scaled])
    while True:
        runs = [Run(study, cell, rate, SEEDS[0]) for rate in rates]
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
    runs = tuning(study, Cell(cell.optimizer, cell.scaled, cell.init))
    if not all(run.summary for run in runs):
        return [] if cell.blind else runs
    rate = best(runs).rate
    repeated = [Run(study, cell, rate, seed) for seed in cell.seeds]
    return repeated if cell.blind else runs + repeated[1:]


def needed_at_chosen_rate(study: Path, cell: Cell) -> list[Run]:
    """One run, at the learning rate that the published study chose."""
    if not CHOSEN.exists():
        raise UserError(f"{CHOSEN} is missing: run the whole study, or get the file from the repository")
    rates = {row["cell"]: float(row["rate"]) for row in csv.DictReader(CHOSEN.open())}
    if cell.name not in rates:
        raise UserError(f"{CHOSEN} has no rate for {cell.name}: run the whole study first")
    return [Run(study, cell, rates[cell.name], SEEDS[0])]


# ---------------------------------------------------------------------------------------------------------------------
# Running it


def conduct(plan, cells: list[Cell], jobs: int, overrides: list[str]) -> None:
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
                finish(run, process)
                made += 1
                runs = [run for cell in cells for run in plan(cell)]
                left = sum(not run.summary for run in runs)
                seconds = (time.perf_counter() - began) / made * left
                print(
                    f"{describe(run)} | {len(runs) - left}/{len(runs)} known runs, {log.duration(seconds)} left",
                    flush=True,
                )
                report(cells, plan, run.study)
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


def finish(run: Run, process: subprocess.Popen) -> None:
    """Keep what the study needs, drop weights and checkpoints."""
    folder, kept = aside(run), ["config.yaml", "metrics.jsonl", "summary.json"]
    if failed(process):
        raise UserError(f"a run failed, and the study with it: see {folder / 'output.txt'}")
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


# ---------------------------------------------------------------------------------------------------------------------
# What came out


def report(cells: list[Cell], plan, study: Path) -> None:
    """table.csv, table.md and hump.png of what is finished, at each cell's best learning rate so far."""
    rows, chosen = [], []
    alone = [run.summary["eval/loss"] for cell in cells if cell.blind for run in plan(cell) if run.summary]
    for cell in cells:
        planned = plan(cell)
        runs = [run for run in planned if run.summary]
        if not runs:
            continue
        rate = best([run for run in runs if run.seed == SEEDS[0]]).rate
        tried = {run.rate: run.summary["eval/loss"] for run in runs if run.seed == SEEDS[0]}
        repeated = [run for run in runs if run.rate == rate and run.summary["eval/loss"] < math.inf]
        chosen += repeated
        losses = [run.summary["eval/loss"] for run in repeated]
        logs = [curve.read(run.folder) for run in repeated]
        shapes = [curve.shapes(events)["training"] for events in logs]
        rows.append(
            {
                "cell": cell.name,
                "rate": f"{rate:g}",
                "plateau": ", ".join(f"{s['plateau']:.2f}" if s["plateau"] else "none" for s in shapes),
                "escape": ", ".join(str(s["escape"] or "none") for s in shapes),
                "passes blind": ", ".join(passes(events, alone) for events in logs),
                "alignment": ", ".join(f"{curve.alignment(events)[1][-1].mean():.2f}" for events in logs),
                "held-out loss": ", ".join(f"{loss:.3f}" for loss in losses),
                "rates tried": ", ".join(f"{r:g}: {loss:.3f}" for r, loss in sorted(tried.items())),
                "runs to go": len(planned) - len(runs),
            }
        )
    if not chosen:
        return
    with (study / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
    (study / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    draw(chosen, study / "hump.png")


def passes(events: list[dict], alone: list[float]) -> str:
    """The step of the first evaluation below the loss that the decoder alone ends at, where that is known."""
    below = (step for step, loss in zip(*curve.series(events, "eval/loss")) if loss < min(alone))
    return str(next(below, "never")) if alone else "unknown"


def draw(runs: list[Run], path: Path) -> None:
    """Held-out loss over the heads' mean alignment, a column for each initialization, a line for each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    inits = list(dict.fromkeys(run.cell.init for run in runs))
    colors = dict(zip(dict.fromkeys(cell.optimizer for cell in GRID), curve.COLORS))
    figure = Figure(figsize=(2 + 5 * len(inits), 7.5), layout="constrained")
    axes = figure.subplots(2, len(inits), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 1))
    for run in runs:
        events = curve.read(run.folder)
        style = {"color": colors[run.cell.optimizer], "linestyle": "solid" if run.cell.scaled else "dashed"}
        label = f"{run.cell.optimizer}{', RMS scaling' if run.cell.scaled else ''}, rate {run.rate:g}"
        if run.cell.blind:
            style, label = {"color": "black", "linestyle": "dotted"}, "without the encoder"
        width = 1.5 if run.seed == SEEDS[0] else 0.6
        for column, init in enumerate(inits):
            if init != run.cell.init and not run.cell.blind:
                continue
            losses, alignments = axes[:, column]
            losses.plot(*curve.series(events, "eval/loss"), **style, linewidth=width)
            if run.seed == SEEDS[0]:
                losses.plot([], [], **style, label=label)
            if not run.cell.blind:
                steps, heads = curve.alignment(events)
                alignments.plot(steps, [shares.mean() for shares in heads], **style, linewidth=width)
    entropy = curve.series(events, "data/unigram_entropy")[1][0]
    for init, (losses, alignments) in zip(inits, axes.T):
        losses.set_title(f"model.init={init}")
        losses.axhline(entropy, color="gray", linewidth=1, label="unigram entropy of the targets")
        alignments.set_xlabel("steps")
        alignments.grid(alpha=0.3)
        curve.loss_axes(losses)
        losses.legend(fontsize="small")
    axes[0, 0].set_ylabel("held-out loss, nats per target token")
    axes[1, 0].set_ylabel("attention near own sentinel\nless chance, mean of heads")
    FigureCanvasAgg(figure).print_png(path)


# ---------------------------------------------------------------------------------------------------------------------


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


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of nanoT5.main, for every run")
    parser.add_argument("--folder", type=Path, help="of the study (default: logs/hump, or logs/hump-quick)")
    parser.add_argument("--quick", action="store_true", help="the headline cells once, at the published study's rates")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time (default: one for each GPU, else for each CPU core)"
    )
    parser.add_argument(
        "--plot", type=Path, nargs="+", metavar="FOLDER", help="draw the runs below, to plot.png; no runs"
    )
    arguments = parser.parse_intermixed_args()
    if arguments.plot:
        folders = sorted(path.parent for folder in arguments.plot for path in folder.rglob("summary.json"))
        if not folders:
            raise UserError(f"--plot: no finished run below {', '.join(map(str, arguments.plot))}")
        return curve.draw(folders, Path("plot.png"))
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UserError(f"--jobs={arguments.jobs}: it has to be a whole number from 1 up")
    example = Run(Path(), GRID[0], 1.0, 0).overrides
    for override in arguments.overrides:
        if override.split("=")[0] in [own.split("=")[0] for own in example]:
            raise UserError(f"{override}: the study sets this key itself")
    config.check(config.load([*arguments.overrides, *example])[0])
    study = arguments.folder or Path("logs/hump-quick" if arguments.quick else "logs/hump")
    study.mkdir(parents=True, exist_ok=True)
    with locked(study):
        given, note = " ".join(arguments.overrides), study / "overrides.txt"
        if note.exists() and note.read_text() != given:
            raise UserError(
                f"--folder={study} holds a study with the overrides '{note.read_text()}': name another folder"
            )
        note.write_text(given)
        shutil.rmtree(study / RUNNING, ignore_errors=True)
        cells, plan = (HEADLINE, needed_at_chosen_rate) if arguments.quick else (GRID, needed)
        plan = functools.partial(plan, study)
        conduct(plan, cells, arguments.jobs or torch.cuda.device_count() or os.cpu_count(), arguments.overrides)
        report(cells, plan, study)
        print(f"see {study / 'table.md'} and {study / 'hump.png'}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends its runs, as Ctrl-C does
    try:
        command_line()
    except UserError as error:
        sys.exit(f"hump: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
