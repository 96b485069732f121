"""Reading the logs of runs, and drawing their curves."""

import itertools
import json
from pathlib import Path

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito's, told apart by everyone


def read(folder: Path) -> list[dict]:
    """The log events of a run, in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def draw(folders: list[Path], path: Path) -> None:
    """Training and held-out loss of runs, against steps and against tokens, with logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for folder, color in zip(folders, itertools.cycle(COLORS)):
        events = read(folder)
        training = [event for event in events if "train/loss" in event]
        tokens = {event["step"]: event["train/input_tokens"] + event["train/target_tokens"] for event in training}
        evaluations = [event for event in events if "eval/loss" in event]
        for axis, x in zip(axes, (lambda step: step, tokens.get)):
            axis.plot(
                [x(event["step"]) for event in training],
                [event["train/loss"] for event in training],
                color=color,
                alpha=0.6,
                linewidth=1,
                label=f"{folder.name}, training",
            )
            axis.plot(
                [x(event["step"]) for event in evaluations],
                [event["eval/loss"] for event in evaluations],
                color=color,
                marker="o",
                markersize=3,
                label=f"{folder.name}, held out",
            )
    for axis, label in zip(axes, ("steps", "input and target tokens")):
        axis.set(xscale="log", yscale="log", xlabel=label)
        for ticks, subs in ((axis.xaxis, (1, 2, 5)), (axis.yaxis, (1, 1.5, 2, 3, 3.5, 4, 4.5, 5, 6, 8))):
            ticks.set_major_locator(LogLocator(subs=subs))
            ticks.set_major_formatter(EngFormatter(sep=""))
            ticks.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss, nats per target token")
    low, high = axes[0].get_ylim()
    if low < 6:
        axes[0].set_ylim(top=min(7, high))  # the first steps would squeeze the rest
    axes[0].legend()
    FigureCanvasAgg(figure).print_png(path)
