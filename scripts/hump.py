"""The study: with which optimizer, RMS scaling and initialization does T5 leave the plateau?

    python scripts/hump.py                        # the whole grid: 5 to 6 hours on two CPU cores
    python scripts/hump.py --quick                # AdamW without and with RMS scaling, two initializations: 20 minutes
    python scripts/hump.py model=small optim.batch_size=256    # the same with other overrides of nanoT5.main
    python scripts/hump.py --plot FOLDER ...      # one figure of any runs

A cell of the grid is an optimizer, RMS scaling or none, and an initialization, each at the learning rate that is best
for it, as scripts/study.py says. The headline cells are repeated with two more seeds.
"""

import csv
import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot  # noqa: E402
import study  # noqa: E402

from nanoT5 import UserError, curve, script  # noqa: E402

CHOSEN = study.ROOT / "assets" / "hump" / "table.csv"  # where --quick finds its learning rates
SEEDS = (0, 1, 2)  # of the headline cells; the others have the first alone
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
class Cell(study.Cell):
    optimizer: str
    scaled: bool  # by RMS
    init: str
    blind: bool = False  # a reference without the encoder, at the learning rate of the cell that has one

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{'scaled' if self.scaled else 'plain'}-{self.init}{'-blind' if self.blind else ''}"

    @property
    def overrides(self) -> list[str]:
        return [
            f"optim.name={self.optimizer}",
            f"optim.rms_scale={str(self.scaled).lower()}",
            f"model.init={self.init}",
            f"model.blind_encoder={str(self.blind).lower()}",
        ]

    @property
    def first_rates(self) -> tuple[float, ...]:
        return FIRST_RATES[self.optimizer, self.scaled]

    @property
    def seeds(self) -> tuple[int, ...]:
        return SEEDS if self in HEADLINE else SEEDS[:1]

    @property
    def rate_of(self) -> "Cell | None":
        return Cell(self.optimizer, self.scaled, self.init) if self.blind else None


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


def at_chosen_rate(folder: Path, cell: Cell) -> list[study.Run]:
    """One run, at the learning rate that the published study chose."""
    if not CHOSEN.exists():
        raise UserError(f"{CHOSEN} is missing: run the whole study, or get the file from the repository")
    rates = {row["cell"]: float(row["rate"]) for row in csv.DictReader(CHOSEN.open())}
    if cell.name not in rates:
        raise UserError(f"{CHOSEN} has no rate for {cell.name}: run the whole study first")
    return [study.Run(folder, cell, rates[cell.name], SEEDS[0])]


def report(folder: Path, cells: list[Cell], plan: study.Plan) -> None:
    """table.csv, table.md and hump.png of what is finished, at each cell's best learning rate so far."""
    rows, chosen = [], []
    alone = [run.summary["eval/loss"] for cell in cells if cell.blind for run in plan(cell) if run.summary]
    for cell in cells:
        planned = plan(cell)
        runs = [run for run in planned if run.summary]
        if not runs:
            continue
        rate = study.best([run for run in runs if run.seed == SEEDS[0]]).rate
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
    study.write_table(folder, rows)
    draw(chosen, folder / "hump.png")


def passes(events: list[dict], alone: list[float]) -> str:
    """The step of the first evaluation below the loss that the decoder alone ends at, where that is known."""
    below = (step for step, loss in zip(*curve.series(events, "eval/loss")) if loss < min(alone))
    return str(next(below, "never")) if alone else "unknown"


def draw(runs: list[study.Run], path: Path) -> None:
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


def command_line() -> None:
    parser = study.parser(__doc__, "hump")
    parser.add_argument("--quick", action="store_true", help="the headline cells once, at the published study's rates")
    parser.add_argument(
        "--plot", type=Path, nargs="+", metavar="FOLDER", help="draw the runs below, to plot.png; no runs"
    )
    arguments = parser.parse_intermixed_args()
    if arguments.plot:
        return curve.draw(plot.below(arguments.plot), Path("plot.png"))
    cells, plan = (HEADLINE, at_chosen_rate) if arguments.quick else (GRID, study.needed)
    study.run(arguments, cells, report, plan)
    print(f"see {arguments.folder / 'table.md'} and {arguments.folder / 'hump.png'}")


if __name__ == "__main__":
    script(command_line)
