"""Experiment trackers, through Accelerate: they are told what metrics.jsonl says, under the same names.

None is imported unless logging.trackers names it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from nanoT5 import UserError

NAMES = tuple(kind.value for kind in LoggerType if kind is not LoggerType.ALL)


def check(names: list[str]) -> None:
    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in installed:
            raise UserError(f"logging.trackers={name}, which is not installed: pip install {name}, or leave it out")


def start(accelerator: Accelerator, settings: dict[str, object], folder: Path) -> None:
    """Open the trackers that the accelerator was built with, and tell them the config, every key with its value."""
    settings = {key: value if type(value) in (bool, int, float, str) else str(value) for key, value in settings.items()}
    names = {"wandb": {"name": folder.name}, "trackio": {"name": folder.name}, "mlflow": {"run_name": folder.name}}
    accelerator.init_trackers("nanoT5", settings, names)


@contextmanager
def closed_by_errors(accelerator: Accelerator) -> Iterator[None]:
    """Else a run that diverged would be in the way of the next one in the same process."""
    try:
        yield
    except BaseException:
        for tracker in accelerator.trackers:
            tracker.finish()
        raise


def numbers(event: dict) -> dict[str, float]:
    """What of a log event or a summary is a number, which is all that trackers draw."""
    return {key: value for key, value in event.items() if type(value) in (int, float)}


def finish(accelerator: Accelerator, summary: dict, step: int, curve: Path) -> None:
    """Tell them the summary and the picture of the curve, and close them."""
    if not accelerator.trackers:
        return
    from matplotlib.image import imread

    accelerator.log({f"summary/{key}": value for key, value in numbers(summary).items()}, step)
    for tracker in accelerator.trackers:
        if tracker.name == "mlflow":
            tracker.log_artifact(str(curve))
        elif hasattr(tracker, "log_images"):
            picture = imread(curve)[None, ..., :3]  # (1, height, width, colours)
            axes = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"curve": picture}, step, **axes)
        tracker.finish()
