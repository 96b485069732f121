"""Weights to and from disk: checkpoints to go on from, and the export in Transformers' format.

A checkpoint is a folder `step-N` with weights and optimizer state in safetensors and all else in state.json, which also
has the hash of either file. It is written aside and then moved, so that a process killed at any moment leaves none that
is not whole; one that was damaged later is noticed, and the one before it used. Under FSDP the tensors are put together
for the file and cut up again by whoever reads it, so that any number of processes can go on from it.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from nanoT5 import UserError, config, relora
from nanoT5.optim import Optimizer
from nanoT5.sharding import sharded_as, whole

TENSORS = ("model.safetensors", "optimizer.safetensors")


def gathered(tensors: Iterable[tuple[str, Tensor]], is_main_process: bool) -> dict[str, Tensor]:
    """Whole and on the CPU, in the main process; one after the other, so that a GPU holds no more than one of them."""
    found = {}
    for name, tensor in tensors:
        tensor = whole(tensor)
        if is_main_process:
            found[name] = tensor.cpu()
    return found


def weights(t5: nn.Module) -> dict[str, Tensor]:
    """The state dict without the embedding's two other names."""
    return {name: tensor for name, tensor in t5.state_dict().items() if "embed_tokens" not in name}


@torch.no_grad()
def load_weights(t5: nn.Module, key: str, path: Path) -> None:
    """From a checkpoint or exported model folder, or from a .safetensors file; key is the config's, for complaints."""
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        loaded = safetensors.torch.load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{key}={path} cannot be read as weights ({error}): name a checkpoint, model or .safetensors file"
        ) from None
    expected = weights(t5)
    for name in sorted(expected.keys() | loaded.keys()):
        there, here = (list(w[name].shape) if name in w else "absent" for w in (loaded, expected))
        if there != here and "embed_tokens" not in name:
            raise UserError(
                f"{key}={path} does not fit the model: {name} is {there} there, {here} here "
                "(see data.tokenizer, model.init)"
            )
    for name, parameter in expected.items():
        parameter.copy_(loaded[name])


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def save(
    folder: Path, t5: nn.Module, optimizer: Optimizer, state: dict, keep: int | None, is_main_process: bool
) -> Path:
    """Write folder/step-N and drop all but the newest `keep`; every process has to call it, and one writes."""
    groups = weights(t5).items(), optimizer_tensors(t5, optimizer)
    tensors = {name: gathered(group, is_main_process) for name, group in zip(TENSORS, groups)}
    step = state["progress"]["step"]
    final = folder / f"step-{step}"
    if not is_main_process:
        return final
    aside = folder / f".writing-{step}"
    try:
        for left in folder.glob(".writing-*"):  # by a process that was killed
            shutil.rmtree(left)
        aside.mkdir(parents=True)
        for name, group in tensors.items():
            safetensors.torch.save_file(group, aside / name)
        hashes = {name: sha256((aside / name).open("rb")) for name in TENSORS}
        state |= {"optimizer_steps": [group["steps"] for group in optimizer.param_groups]}
        hashes["state"] = sha256(as_file(state))
        (aside / "state.json").write_text(json.dumps({"sha256": hashes, "state": state}))
        shutil.rmtree(final, ignore_errors=True)  # a damaged one, or one that a resumed run passes again
        aside.rename(final)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        before = found(folder)
        raise UserError(
            f"the checkpoint of step {step} could not be written ({error}): make room in {folder}, and the "
            f"same command goes on from {before[0] if before else 'the start'}"
        ) from None
    passed = [path for path in found(folder) if int(path.name[5:]) <= step]  # those ahead are damaged
    for old in passed[keep:] if keep else ():
        shutil.rmtree(old)
    return final


def optimizer_tensors(t5: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in t5.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            yield f"{name}/{key}", tensor


def as_file(state: dict) -> io.BytesIO:
    return io.BytesIO(json.dumps(state).encode())


def sha256(file: io.BufferedIOBase) -> str:
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Going on


def found(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    numbered = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name[5:]), reverse=True)


def is_intact(path: Path) -> bool:
    """Whether nothing of a checkpoint is missing or changed."""
    try:
        content = json.loads((path / "state.json").read_text())
        found = {name: sha256((path / name).open("rb")) for name in TENSORS}
        return content["sha256"] == found | {"state": sha256(as_file(content["state"]))}
    except (OSError, ValueError, KeyError, TypeError):
        return False


def choose(path: Path, say: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint of a run folder, or path itself if it is one; None where there is none at all."""
    there = [path] if (path / "state.json").exists() else found(path / "checkpoints")
    for checkpoint in there:
        if is_intact(checkpoint):
            return checkpoint
        say(f"{checkpoint} is damaged")
    if there:
        raise UserError(f"no checkpoint in {path} is whole: name another folder, or remove what is damaged")
    return None


def read(path: Path, cfg: DictConfig, origin: dict, say: Callable[[str], None]) -> dict:
    """The state of an intact checkpoint, if its configuration and the origin of its data go with these."""
    state = json.loads((path / "state.json").read_text())["state"]
    before, now = state["config"], config.flat(cfg)
    changed = {key: f"{key}={before.get(key)} there, {now[key]} here" for key in now if before.get(key) != now[key]}
    fatal = [text for key, text in changed.items() if config.decides(key)]
    same_data = state["origin"] == origin
    if not same_data and not fatal:
        fatal = ["the text or the tokenizer is another one"]
    if fatal and not cfg.checkpoint.force:
        raise UserError(
            f"checkpoint.resume: {path} was made with another configuration ({'; '.join(fatal)}): "
            "name another run folder, or say checkpoint.force=true to go on all the same"
        )
    for key, text in changed.items():
        if not config.is_free(key):
            say(f"since {path}: {text}")
    if not same_data:
        state["progress"]["data"] = None
    if not changed.keys().isdisjoint(["optim.name", "optim.rms_scale"]):
        state["optimizer_steps"] = None
    return state


def load_optimizer(path: Path, steps: list[int], t5: nn.Module, optimizer: Optimizer) -> None:
    """steps: how many every parameter group has made."""
    for group, count in zip(optimizer.param_groups, steps):
        group["steps"] = count
    parameters = dict(t5.named_parameters())
    for name, tensor in safetensors.torch.load_file(path / "optimizer.safetensors").items():
        name, key = name.split("/")
        if parameters[name].requires_grad:  # else adapters are to train it from here on
            optimizer.state[parameters[name]][key] = sharded_as(tensor, parameters[name])


# ---------------------------------------------------------------------------------------------------------------------
# Export


def export(folder: Path, t5: nn.Module, shape, tokenizer, is_main_process: bool) -> None:
    """The trained model as transformers.AutoModelForSeq2SeqLM loads it, and its tokenizer as AutoTokenizer does."""
    from transformers import GenerationConfig

    tensors = gathered(weights(t5).items(), is_main_process)
    if not is_main_process:
        return
    tensors = relora.without_adapters(tensors, t5)
    shape.architectures = ["T5ForConditionalGeneration"]
    shape.tie_word_embeddings = False  # Transformers 5 sets it to True whatever one asks for
    shape.save_pretrained(folder)
    GenerationConfig.from_model_config(shape).save_pretrained(folder)
    if "shared.norm.weight" in tensors:  # Transformers has no such norm, but one that only sees an embedding is a table
        scale = tensors.pop("shared.norm.weight")
        tensors["shared.weight"] = F.rms_norm(tensors["shared.weight"], scale.shape, scale, shape.layer_norm_epsilon)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(folder)
