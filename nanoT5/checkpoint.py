"""Weights to and from disk: checkpoints to go on from, and the export in Transformers' format."""

import json
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from nanoT5 import UserError
from nanoT5.log import Progress
from nanoT5.optim import Optimizer


def weights(t5: nn.Module) -> dict[str, Tensor]:
    """The state dict without the embedding's two other names."""
    return {name: tensor.contiguous() for name, tensor in t5.state_dict().items() if "embed_tokens" not in name}


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
    t5.load_state_dict(loaded, strict=False)


def save(folder: Path, t5: nn.Module, optimizer: Optimizer, progress: Progress) -> Path:
    """Written aside and then moved, so that a folder called step-N is always whole."""
    final = folder / f"step-{progress.step}"
    aside = folder / f".writing-{progress.step}"
    aside.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(weights(t5), aside / "model.safetensors")
    safetensors.torch.save_file(optimizer_tensors(t5, optimizer), aside / "optimizer.safetensors")
    state = asdict(progress) | {"optimizer_steps": [group["steps"] for group in optimizer.param_groups]}
    (aside / "state.json").write_text(json.dumps(state))
    aside.rename(final)
    return final


def optimizer_tensors(t5: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": tensor
        for name, parameter in t5.named_parameters()
        for key, tensor in optimizer.state[parameter].items()
    }


def load(path: Path, t5: nn.Module, optimizer: Optimizer, progress: Progress) -> None:
    if not (path / "state.json").is_file() or not (path / "optimizer.safetensors").is_file():
        raise UserError(f"checkpoint.resume={path} is not a checkpoint: name a run's checkpoints/step-N folder")
    load_weights(t5, "checkpoint.resume", path)
    state = json.loads((path / "state.json").read_text())
    for group, steps in zip(optimizer.param_groups, state.pop("optimizer_steps")):
        group["steps"] = steps
    parameters = dict(t5.named_parameters())
    for name, tensor in safetensors.torch.load_file(path / "optimizer.safetensors").items():
        parameter, key = name.split("/")
        optimizer.state[parameters[parameter]][key] = tensor.to(parameters[parameter].device)
    for key, value in state.items():
        setattr(progress, key, value)


def export(folder: Path, t5: nn.Module, shape, tokenizer) -> None:
    """The trained model as transformers.AutoModelForSeq2SeqLM loads it, and its tokenizer as AutoTokenizer does."""
    from transformers import GenerationConfig

    shape.architectures = ["T5ForConditionalGeneration"]
    shape.tie_word_embeddings = False  # Transformers 5 sets it to True whatever one asks for
    shape.save_pretrained(folder)
    GenerationConfig.from_model_config(shape).save_pretrained(folder)
    tensors = weights(t5)
    if "shared.norm.weight" in tensors:  # Transformers has no such norm, but one that only sees an embedding is a table
        del tensors["shared.norm.weight"]
        tensors["shared.weight"] = t5.shared.norm(tensors["shared.weight"])
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(folder)
