"""ReLoRA against full training and LoRA, on the same tokens: about two hours on two CPU cores.

    python scripts/relora.py
    python scripts/relora.py model=small optim.batch_size=256    # the same with other overrides of nanoT5.main

Every cell has the learning rate that is best for it, as scripts/study.py says. Beside its held-out loss the table has
what is trained, the bytes of the optimizer's state, the speed, and the rank of what training has added to the adapted
matrices: the share of singular values of W_T - W_0 above a hundredth of the largest, a mean over the matrices.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import safetensors.torch  # noqa: E402
import study  # noqa: E402
import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from transformers import T5Config  # noqa: E402

from nanoT5 import checkpoint, curve, model, relora, script  # noqa: E402

ABOVE = 0.01  # of the largest singular value


@dataclass(frozen=True)
class Cell(study.Cell):
    name: str
    own: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        return list(self.own)

    @property
    def first_rates(self) -> tuple[float, ...]:
        return 1e-2, 3e-2, 1e-1, 3e-1  # of AdamW with RMS scaling, as in scripts/hump.py


RESTARTS = ("relora.every=300", "optim.lr_scheduler=jagged_cosine")
CELLS = [  # of a model that is 128 wide
    Cell("full"),
    *(Cell(f"relora-{rank}", (f"relora.rank={rank}", *RESTARTS)) for rank in (8, 32, 128)),
    Cell("relora-32-warm", ("relora.rank=32", "relora.warm_start_steps=300", *RESTARTS)),
    Cell("lora-32", ("relora.rank=32", "relora.every=1000000")),
    Cell("identity", ("relora.init=identity", "relora.reset_optimizer=none", "relora.every=300")),
]


def change(folder: Path) -> dict:
    """The rank of what training added, and the size of the optimizer's state, of a run folder."""
    cfg, shape = OmegaConf.load(folder / "config.yaml"), T5Config.from_pretrained(folder / "model")
    first = model.CLASSES[cfg.model.klass](shape)
    m = cfg.model
    distributions = model.initial_distributions(shape, m.init, m.init_std, m.init_distribution, m.std)
    model.initialize(first, distributions, cfg.seed)
    last = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    shares = []
    for name, linear in relora.chosen(first, cfg.relora).items():
        values = torch.linalg.svdvals(last[f"{name}.weight"] - linear.weight.detach())
        shares.append((values > ABOVE * values[0]).float().mean().item())
    state = checkpoint.found(folder / "checkpoints")[0] / "optimizer.safetensors"
    return {"rank_of_change": sum(shares) / len(shares), "optimizer_bytes": state.stat().st_size}


def report(folder: Path, cells: list[Cell], plan: study.Plan) -> None:
    """table.csv, table.md and relora.png of what is finished, at each cell's best learning rate so far."""
    rows, chosen = [], []
    for cell in cells:
        planned = plan(cell)
        runs = [run for run in planned if run.summary and run.summary["eval/loss"] < math.inf]
        if not runs:
            continue
        run = study.best(runs)
        chosen.append(run.folder)
        speeds = curve.series(curve.read(run.folder), "train/tokens_per_second")[1]
        rows.append(
            {
                "cell": cell.name,
                "rate": f"{run.rate:g}",
                "held-out loss": f"{run.summary['eval/loss']:.3f}",
                "trained": f"{run.summary['trainable_parameters']:,} of {run.summary['parameters']:,}",
                "optimizer, MB": f"{run.summary['optimizer_bytes'] / 1e6:.1f}",
                "tokens/s": f"{median(speeds):,.0f}",
                "rank of the change": f"{run.summary['rank_of_change']:.0%}",
                "rates tried": ", ".join(f"{r.rate:g}: {r.summary['eval/loss']:.3f}" for r in runs),
                "runs to go": sum(not run.summary for run in planned),
            }
        )
    if chosen:
        study.write_table(folder, rows)
        curve.draw(chosen, folder / "relora.png")


def command_line() -> None:
    arguments = study.parser(__doc__, "relora").parse_intermixed_args()
    study.run(arguments, CELLS, report, extra=change)
    print(f"see {arguments.folder / 'table.md'} and {arguments.folder / 'relora.png'}")


if __name__ == "__main__":
    script(command_line)
