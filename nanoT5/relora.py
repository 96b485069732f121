"""ReLoRA: train low-rank adapters, merge them, begin with new ones (Lialin et al. 2023, arXiv:2307.05695).

An adapted matrix computes W x + s B A x with s = alpha / rank, W frozen, A (rank, in) drawn Kaiming-uniform and B
(out, rank) zero at first (Hu et al. 2021, arXiv:2106.09685). A restart adds s B A to W, which leaves the function as
it was, draws A anew, makes B zero again and resets the optimizer's state of both. All else trains in full.

With init=identity A has the shape of W and starts at zero, B is the identity and stays it, and s is 1: training is that
of the whole matrix, which shows whether anything else goes wrong.

RMS scaling would hold B, which is zero, at its floor of 1e-3. The floor of a B is instead what makes a step change
s B A by as much, relative to W, as the same step of a whole matrix would change W: RMS(W) / (s RMS(A) sqrt(rank)), with
the RMS of A as drawn. A is scaled by its own RMS like any other tensor, with init=identity by at least that of W.
"""

import math
import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoT5.optim import Optimizer, rms
from nanoT5.sharding import sharded_as, whole


class LowRank(nn.Module):
    """In the place of a linear map without bias, whose weight it takes over under the same name."""

    def __init__(self, linear: nn.Linear, cfg):
        super().__init__()
        self.weight = linear.weight.requires_grad_(False)
        outputs, inputs = linear.weight.shape
        identity = cfg.init == "identity"
        self.rank = outputs if identity else cfg.rank
        self.scale = 1.0 if identity or cfg.alpha is None else cfg.alpha / cfg.rank
        self.lora_A = nn.Parameter(self.weight.new_zeros(self.rank, inputs))
        self.lora_B = None if identity else nn.Parameter(self.weight.new_zeros(outputs, self.rank))
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(self.dropout(x), self.lora_A)
        if self.lora_B is not None:
            low = F.linear(low, self.lora_B)
        return F.linear(x, self.weight) + self.scale * low

    def change(self) -> Tensor:
        """s B A, (out, in)."""
        return self.lora_A if self.lora_B is None else self.scale * (self.lora_B @ self.lora_A)


def is_on(cfg) -> bool:
    return cfg.rank is not None or cfg.init == "identity"


def adapted(t5: nn.Module) -> list[LowRank]:
    return [module for module in t5.modules() if isinstance(module, LowRank)]


# ---------------------------------------------------------------------------------------------------------------------
# When


def begins(cfg, step: int) -> bool:
    """Whether the adapters' first step is the next one, after so many; before, all weights are trained in full."""
    return is_on(cfg) and step == cfg.warm_start_steps


def restarts(cfg, step: int) -> bool:
    return is_on(cfg) and step > cfg.warm_start_steps and step % cfg.every == 0


# ---------------------------------------------------------------------------------------------------------------------
# What


def chosen(t5: nn.Module, cfg) -> dict[str, nn.Linear]:
    """The linear maps whose name has a match of cfg.modules."""
    linears = {name: module for name, module in t5.named_modules() if isinstance(module, nn.Linear)}
    return {name: linear for name, linear in linears.items() if re.search(cfg.modules, name)}


def wrap(t5: nn.Module, cfg, seed: int) -> None:
    """Put adapters on the chosen linear maps."""
    for name, linear in chosen(t5, cfg).items():
        parent, _, own = name.rpartition(".")
        setattr(t5.get_submodule(parent), own, LowRank(linear, cfg))
    draw(t5, seed, cfg.warm_start_steps)


@torch.no_grad()
def draw(t5: nn.Module, seed: int, step: int) -> None:
    """Begin with new adapters: the same ones in every process, each of which keeps its share."""
    generator = torch.Generator().manual_seed((seed << 32) + (1 << 31) + step)
    for module in adapted(t5):
        if module.lora_B is None:
            module.lora_A.zero_()
        else:
            half_width = module.lora_A.shape[1] ** -0.5  # Kaiming-uniform with a = sqrt(5), as LoRA draws it
            drawn = torch.empty(module.lora_A.shape).uniform_(-half_width, half_width, generator=generator)
            module.lora_A.copy_(sharded_as(drawn.to(module.lora_A.dtype), module.lora_A))
            module.lora_B.zero_()


@torch.no_grad()
def merge(t5: nn.Module) -> None:
    for module in adapted(t5):
        module.weight.add_(module.change())


@torch.no_grad()
def set_floors(t5: nn.Module, optimizer: Optimizer) -> None:
    """The smallest RMS scale of every tensor that starts at zero; see above."""
    modules = adapted(t5)
    for module, size in zip(modules, rms([module.weight for module in modules]) if modules else ()):
        if module.lora_B is None:
            optimizer.state[module.lora_A]["smallest_scale"] = size
        else:
            drawn = (3 * module.lora_A.shape[1]) ** -0.5  # RMS of A
            optimizer.state[module.lora_B]["smallest_scale"] = size / (module.scale * drawn * math.sqrt(module.rank))


@torch.no_grad()
def restart(t5: nn.Module, optimizer: Optimizer, cfg, seed: int, step: int) -> None:
    merge(t5)
    draw(t5, seed, step)
    generator = torch.Generator().manual_seed((seed << 32) + (3 << 30) + step)
    for group in optimizer.param_groups:
        if group.get("adapters") and cfg.reset_optimizer == "zero":
            group["steps"] = 0  # so that bias correction knows of it
    for parameter in parameters(t5):
        state = optimizer.state[parameter]
        state.pop("initial_rms", None)
        for name, tensor in state.items():
            if name != "smallest_scale":
                state[name] = reset(tensor, parameter, cfg, generator)
    set_floors(t5, optimizer)


def parameters(t5: nn.Module) -> Iterator[nn.Parameter]:
    for module in adapted(t5):
        yield module.lora_A
        if module.lora_B is not None:
            yield module.lora_B


def reset(tensor: Tensor, parameter: Tensor, cfg, generator: torch.Generator) -> Tensor:
    """A tensor of the optimizer's state of which as much is zero as cfg says, and no more."""
    if cfg.reset_optimizer == "none":
        return tensor
    if cfg.reset_optimizer == "zero":
        return torch.zeros_like(tensor)
    full = whole(tensor).clone()
    random = torch.rand(full.numel(), generator=generator)
    order = (full.abs().flatten() if cfg.reset_optimizer == "magnitude" else random).argsort()
    full.view(-1)[order[: round(cfg.reset_ratio * full.numel())]] = 0.0
    return sharded_as(full, parameter)


def without_adapters(tensors: dict[str, Tensor], t5: nn.Module) -> dict[str, Tensor]:
    """A state dict in which they are merged."""
    tensors = dict(tensors)
    for name, module in t5.named_modules():
        if isinstance(module, LowRank):
            low = tensors.pop(f"{name}.lora_A")
            if module.lora_B is not None:
                low = module.scale * (tensors.pop(f"{name}.lora_B") @ low)
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + low
    return tensors
