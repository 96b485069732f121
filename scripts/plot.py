"""Compare any runs in one figure and one table: python scripts/plot.py RUN ...

    python scripts/plot.py logs/2026-12-01/*               # plot.png and plot.svg of all runs below these folders
    python scripts/plot.py RUN RUN --to ours.svg --table   # and what they came to, with the differences to the first

Losses against steps, tokens and seconds of training, on logarithmic axes; below them each head's alignment. Training
losses are means since the last log event, nothing else is smoothed. A dotted line is a plateau's level, a dashed one
the escape. What only some of the runs' configurations say is in the legend.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoT5 import UserError, curve, script  # noqa: E402


def below(folders: list[Path]) -> list[Path]:
    """Every run with log events in or below these folders."""
    runs = list(dict.fromkeys(path.parent for folder in folders for path in sorted(folder.rglob("metrics.jsonl"))))
    if not runs:
        raise UserError(f"no run in or below {', '.join(map(str, folders))}: name folders with a metrics.jsonl")
    return runs


def table(runs: list[Path]) -> str:
    """A row of final numbers for each run; in brackets, by how much it is above the first."""
    header = ["run", "held-out loss", "accuracy", "plateau", "escape", "tokens", "tokens/s"]
    rows, first = [header, ["---"] * len(header)], None
    for run, label in zip(runs, curve.differences(runs)):
        events = curve.read(run)
        shape = curve.shapes(events)["training"]
        losses, accuracies = (curve.series(events, f"eval/{key}")[1] for key in ("loss", "accuracy"))
        speeds = curve.series(events, "train/tokens_per_second")[1]
        tokens = [curve.series(events, f"train/{kind}_tokens")[1] for kind in ("input", "target")]
        numbers = [losses[-1] if losses else None, accuracies[-1] if accuracies else None]
        first = first or numbers
        shown = [
            "" if n is None else f"{n:.4f}" if f is None or n is f else f"{n:.4f} ({n - f:+.4f})"
            for n, f in zip(numbers, first)
        ]
        shown.append("none" if shape["plateau"] is None else f"{shape['plateau']:.2f}")
        shown.append("none" if shape["escape"] is None else str(shape["escape"]))
        shown.append(f"{sum(counts[-1] for counts in tokens):,}" if speeds else "")
        shown.append(f"{sorted(speeds)[len(speeds) // 2]:,.0f}" if speeds else "")
        rows.append([label, *shown])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def command_line() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or folders above them")
    parser.add_argument("--to", nargs="+", type=Path, default=[Path("plot.png"), Path("plot.svg")], metavar="FILE")
    parser.add_argument("--table", action="store_true", help="print the final numbers")
    arguments = parser.parse_args()
    runs = below(arguments.runs)
    if arguments.table:
        print(table(runs))
    for path in arguments.to:
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise UserError(f"--to {path}: name a .png, .svg or .pdf file")
        curve.draw(runs, path)
    print(f"{len(runs)} runs: see {', '.join(map(str, arguments.to))}")


if __name__ == "__main__":
    script(command_line)
