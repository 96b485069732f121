"""What the curve of a run shows: reading its log, finding plateau and escape, drawing.

A loss curve is looked at against the logarithm of the step; its speed is the nats that doubling the steps takes off it.
Ordinary training loses ever less that way. A hump is where it does not: the speed falls to a low, the plateau, and then
rises, the escape. In detail, with both loss and speed taken from a straight line fitted over 3/4 of a doubling:

  escape   the speed has risen halfway from a low to the peak after it, which is at least twice the low and 0.25 nats
           per doubling above it. Of several the last one counts. Lows at losses above a ceiling are ignored
  plateau  the stretch before it in which the speed is below that halfway mark; its level is the mean loss of the last
           3/4 of a doubling
  stuck    without an escape: the speed is below 0.1 at the end of the run; the plateau is the stretch for which it was.
           A learning rate that goes to zero slows every run, so that this also describes one that has converged
  final    the mean loss of the last twentieth of the steps
"""

import functools
import itertools
import json
import math
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from nanoT5 import config

POINTS, WINDOW = 32, 24  # points a doubling, points that a line is fitted to
RISE, STUCK = 0.25, 0.1  # nats a doubling
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito's, told apart by everyone


def read(folder: Path) -> list[dict]:
    """The log events of a run, in order; a last line without an end is of an event that could not be written."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def series(events: list[dict], key: str) -> tuple[list[int], list]:
    """(steps, values) of the events that have this key."""
    chosen = [event for event in events if key in event]
    return [event["step"] for event in chosen], [event[key] for event in chosen]


def alignment(events: list[dict]) -> tuple[list[int], list[np.ndarray]]:
    """(steps, (heads,) for each: what every head's attention near its own span's sentinel has over chance)."""
    steps, shares = series(events, "eval/alignment")
    chances = series(events, "eval/alignment_chance")[1]
    return steps, [np.subtract(share, chance).ravel() for share, chance in zip(shares, chances)]


def shapes(events: list[dict]) -> dict[str, dict]:
    """describe() of a run's training loss and of its held-out loss, under the unigram entropy of its targets."""
    ceiling = series(events, "data/unigram_entropy")[1][0]
    return {
        name: describe(*series(events, key), ceiling)
        for name, key in (("training", "train/loss"), ("held_out", "eval/loss"))
    }


def describe(steps: list[int], losses: list[float], ceiling: float = math.inf) -> dict[str, float | int | None]:
    """Plateau level and start, step of escape, final level of one curve, training or held out; None where absent.

    ceiling: loss above which a low of the speed does not count, such as the unigram entropy of the targets.
    """
    shape = dict.fromkeys(("plateau", "plateau_start", "escape", "final"))
    if not steps:  # a run that was interrupted before its first event
        return shape
    last = [loss for step, loss in zip(steps, losses) if step > 0.95 * steps[-1]]
    shape["final"] = sum(last) / len(last)
    at, level, speed = speeds(steps, losses)
    following = np.append(speed[1:], -math.inf)
    peaks = np.flatnonzero((speed[1:] > speed[:-1]) & (speed[1:] >= following[1:])) + 1
    low_enough = np.flatnonzero(level <= ceiling)
    for peak in reversed(peaks):
        # a low before a higher speed belongs to another peak
        higher = np.flatnonzero(speed[:peak] >= speed[peak]).max(initial=-1)
        before = low_enough[(low_enough > higher) & (low_enough < peak)]
        if not len(before):
            continue
        low = before[speed[before].argmin()]
        if speed[peak] < max(2 * speed[low], speed[low] + RISE):
            continue
        halfway = (speed[low] + speed[peak]) / 2
        end = np.flatnonzero(speed[:peak] < halfway)[-1] + 1
        start = np.flatnonzero(speed[:low] >= halfway).max(initial=-1) + 1
        shape["escape"] = round(at[end].item())
        end = max(end - WINDOW // 2, 0)  # the window that ends there
        break
    else:
        if not len(speed) or speed[-1] >= STUCK:
            return shape
        start, end = np.flatnonzero(speed >= STUCK).max(initial=-1) + 1, -1
    return shape | {"plateau": level[end].item(), "plateau_start": round(at[start].item())}


def speeds(steps: list[int], losses: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps, loss, nats lost a doubling there) of lines fitted to windows; all empty for less than a window."""
    doublings = np.log2(steps)
    grid = np.arange(doublings[0], doublings[-1] + 1e-9, 1 / POINTS)
    values = np.interp(grid, doublings, losses)
    if len(values) <= WINDOW:
        return (np.empty(0),) * 3
    windows = np.lib.stride_tricks.sliding_window_view(values, WINDOW + 1)
    offset = np.arange(-WINDOW // 2, WINDOW // 2 + 1) / POINTS
    return 2 ** grid[WINDOW // 2 : -(WINDOW // 2)], windows.mean(axis=1), -(windows @ offset) / (offset @ offset)


def draw(folders: list[Path], path: Path) -> None:
    """Loss and cross-attention's alignment of runs, against steps, tokens and seconds; the path's ending says as what.

    Of the training loss the plateau's level is marked by a dotted line, the escape by a dashed one.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6.5), layout="constrained")
    axes = figure.subplots(2, 3, sharex="col", sharey="row", height_ratios=(3, 1))
    styles = zip(itertools.cycle(COLORS), itertools.cycle("os^Dv"))
    for folder, label, (color, marker) in zip(folders, differences(folders), styles):
        events = read(folder)
        shape = shapes(events)["training"]
        if shape["final"] is None:
            continue
        steps, scales = places(events)
        for (losses, alignments), scale in zip(axes.T, scales):
            place = functools.partial(np.interp, xp=steps, fp=scale)
            held_out = {"marker": marker, "markersize": 3, "label": label}
            for key, style in (("train/loss", {"alpha": 0.6}), ("eval/loss", held_out)):
                at, values = series(events, key)
                losses.plot(place(at), values, color=color, linewidth=1, **style)
            if shape["plateau"]:
                end = shape["escape"] or steps[-1]
                losses.hlines(shape["plateau"], place(shape["plateau_start"]), place(end), color, "dotted")
            for axis in (losses, alignments) if shape["escape"] else ():
                axis.axvline(place(shape["escape"]), color=color, linestyle="dashed", linewidth=1)
            at, heads = alignment(events)
            alignments.plot(place(at), heads, color=color, linewidth=1)
    for axis, label in zip(axes[1], ("steps", "input and target tokens", "seconds of training")):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    for axis in axes[0]:
        loss_axes(axis)
    axes[0, 0].set_ylabel("loss, nats per target token")
    axes[1, 0].set_ylabel("attention near own sentinel\nless chance, each head")
    title = "with markers: held-out loss; without: training loss, means since the last log event"
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", fontsize="small", title=title)
    figure.savefig(path)


def places(events: list[dict]) -> tuple[list[int], tuple[list, list, list]]:
    """(steps of the training events; the steps, tokens and seconds of training until each of them)."""
    steps, speeds = series(events, "train/tokens_per_second")
    tokens = np.add(series(events, "train/input_tokens")[1], series(events, "train/target_tokens")[1])
    return steps, (steps, tokens.tolist(), np.cumsum(np.diff(tokens, prepend=0) / speeds).tolist())


def differences(folders: list[Path]) -> list[str]:
    """A label for each run: its folder's name, and what only some of the runs' configurations say."""
    texts = [
        {f"{k}={v}" for k, v in config.flat(OmegaConf.load(folder / "config.yaml")).items() if v is not None}
        for folder in folders
    ]
    common = set.intersection(*texts)
    return [" ".join([folder.name, *sorted(text - common)]) for folder, text in zip(folders, texts)]


def loss_axes(axis) -> None:
    """Logarithmic axes with plain numbers, without the first steps' height."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axis.set(xscale="log", yscale="log")
    for ticks, subs in ((axis.xaxis, (1, 2, 5)), (axis.yaxis, (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 8))):
        ticks.set_major_locator(LogLocator(subs=subs))
        ticks.set_major_formatter(EngFormatter(sep=""))
        ticks.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3)
    low, high = axis.get_ylim()
    if low < 6:
        axis.set_ylim(top=min(7, high))
