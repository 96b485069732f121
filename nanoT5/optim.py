"""Optimizers, RMS scaling for any of them, learning-rate schedules.

Every optimizer here makes the same step, p <- (1 - lr wd) p - lr s d, and only says its direction d. The scale s is 1,
or with RMS scaling max(1e-3, RMS(p)), RMS(p) = ||p||_2 / sqrt(numel) of each tensor before the step: the parameter
scaling of Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, section 8). Decay is decoupled (Loshchilov and Hutter
2019, arXiv:1711.05101) and not scaled.
"""

import functools
import math

import torch
from torch import Tensor, nn

SMALLEST_SCALE = 1e-3  # Adafactor's epsilon_2: lets a tensor that starts at zero move


class Optimizer(torch.optim.Optimizer):
    """Decay, RMS scaling and the update, for all tensors of a group at once and without waiting for the device.

    A subclass implements direction(); it is called with the parameters that have a gradient.
    """

    default_lr: dict[bool, float]  # without and with RMS scaling

    def __init__(self, params, lr: float | None, weight_decay: float, rms_scale: bool, **hyperparameters):
        lr = self.default_lr[rms_scale] if lr is None else lr
        shared = {"lr": lr, "weight_decay": weight_decay, "rms_scale": rms_scale, "steps": 0}
        super().__init__(params, shared | hyperparameters)

    def direction(self, group: dict, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """The directions of this step, as new tensors; updates the optimizer's state. All are float32 or wider."""
        raise NotImplementedError

    def moment(self, params: list[Tensor], name: str) -> list[Tensor]:
        """The state called name of every parameter, zeros at first."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p, dtype=wide(p))
        return [self.state[p][name] for p in params]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["steps"] += 1
            step = self.direction(group, params, [p.grad.to(wide(p)) for p in params])
            if group["rms_scale"]:
                scales = torch._foreach_norm(params)
                torch._foreach_div_(scales, [math.sqrt(p.numel()) for p in params])
                torch._foreach_clamp_min_(scales, SMALLEST_SCALE)
                torch._foreach_mul_(step, scales)
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, step, alpha=-group["lr"])


def wide(p: Tensor) -> torch.dtype:
    """The precision of a parameter's moments and of its step: at least float32."""
    return torch.promote_types(p.dtype, torch.float32)


class AdamW(Optimizer):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) with decoupled decay; with rms_scale, nanoT5's AdamWScale.

    eps is added to the root of the second moment before bias correction, as Transformers 4 did; torch adds it after.
    """

    # Of 2e-2, 4e-2 and 6e-2, RMS scaling left the plateau first at 4e-2 at the nano shape; 2e-2 is for T5-base
    default_lr = {False: 2e-3, True: 4e-2}

    def __init__(self, params, lr=None, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, rms_scale=False):
        super().__init__(params, lr, weight_decay, rms_scale, betas=betas, eps=eps)

    def direction(self, group, params, grads):
        beta1, beta2 = group["betas"]
        means, squares = self.moment(params, "exp_avg"), self.moment(params, "exp_avg_sq")
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        step = torch._foreach_sqrt(squares)
        torch._foreach_add_(step, group["eps"])
        torch._foreach_reciprocal_(step)
        torch._foreach_mul_(step, means)
        torch._foreach_mul_(step, math.sqrt(1 - beta2 ** group["steps"]) / (1 - beta1 ** group["steps"]))
        return step


OPTIMIZERS = {"adamw": AdamW, "adamwscale": functools.partial(AdamW, rms_scale=True)}


def build(cfg, model: nn.Module) -> Optimizer:
    """The optimizer that cfg, the config's group `optim`, describes, over every parameter of the model exactly once.

    Norms and relative biases are not decayed.
    """
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        (others if "norm" in name or "bias" in name else decayed).append(parameter)
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    given = {"lr": cfg.base_lr, "rms_scale": cfg.rms_scale}
    given = {key: value for key, value in given.items() if value is not None}
    return OPTIMIZERS[cfg.name](groups, weight_decay=cfg.weight_decay, **given)


# ---------------------------------------------------------------------------------------------------------------------
# Schedules: the learning rate of step 0, 1, ..., total_steps - 1


def cosine(step: int, base_lr: float, cfg) -> float:
    """Linear from half of base_lr to base_lr over warmup_steps, then half a cosine down to final_cosine."""
    if step < cfg.warmup_steps:
        return constant(step, base_lr, cfg)
    done = (step - cfg.warmup_steps) / max(1, cfg.total_steps - cfg.warmup_steps)
    return cfg.final_cosine + (base_lr - cfg.final_cosine) * (1 + math.cos(math.pi * done)) / 2


def constant(step: int, base_lr: float, cfg) -> float:
    """Linear from half of base_lr to base_lr over warmup_steps, then base_lr."""
    return base_lr * min(1.0, 0.5 + 0.5 * step / max(1, cfg.warmup_steps))


def legacy(step: int, base_lr: float, cfg) -> float:
    """T5's min(1e-2, 1/sqrt(step)) for nine tenths of the steps, then linear to 0; base_lr has no part in it."""
    turn = math.ceil(0.9 * cfg.total_steps)
    rate = min(1e-2, 1 / math.sqrt(max(1, min(step, turn))))
    return rate if step < turn else rate * (cfg.total_steps - step) / (cfg.total_steps - turn)


SCHEDULES = {"cosine": cosine, "constant": constant, "legacy": legacy}
