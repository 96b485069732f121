"""Optimizers, RMS scaling for any of them, learning-rate schedules.

Every optimizer here makes the same step, p <- (1 - lr wd) p - lr s d, and only says its direction d. The scale s is 1,
or with RMS scaling max(1e-3, RMS(p)), RMS(p) = ||p||_2 / sqrt(numel) of each tensor before the step: the parameter
scaling of Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, section 8). Decay is decoupled (Loshchilov and Hutter
2019, arXiv:1711.05101) and not scaled.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nanoT5.sharding import local

SMALLEST_SCALE = 1e-3  # Adafactor's epsilon_2: lets a tensor that starts at zero move


class Optimizer(torch.optim.Optimizer):
    """Decay, RMS scaling and the update, without waiting for a GPU.

    A subclass implements direction(), which treats each tensor by itself: it is called with one parameter that has a
    gradient on a CPU, with all of a group on a GPU.
    rms_scale: True, False, or "init" for the RMS that a tensor had before its first step, kept from then on.
    """

    default_lr: dict[bool, float]  # without and with RMS scaling

    def __init__(self, params, lr: float | None, weight_decay: float, rms_scale: bool | str, **hyperparameters):
        lr = self.default_lr[bool(rms_scale)] if lr is None else lr
        shared = {"lr": lr, "weight_decay": weight_decay, "rms_scale": rms_scale, "steps": 0}
        super().__init__(params, shared | hyperparameters)

    def direction(self, group: dict, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """The directions of this step, as new tensors; updates the optimizer's state. All are float32 or wider."""
        raise NotImplementedError

    def bias_correction(self, group: dict) -> float:
        """A factor of all directions of this step, which as a number costs less than as a pass over them."""
        return 1.0

    def curvature_is_due(self) -> bool:
        """Whether the training loop is to call update_curvature() before this step's true gradient: Sophia's need."""
        return False

    def update_curvature(self, targets: int) -> None:
        """Take in the gradient of a loss against this many sampled targets."""
        raise NotImplementedError

    def diagnostics(self) -> dict[str, Tensor]:
        """What is worth logging of the last step, by name, as tensors without dimensions."""
        return {}

    def moment(self, params: list[Tensor], name: str) -> list[Tensor]:
        """The state called name of every parameter, zeros at first."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p, dtype=wide(p))
        return [self.state[p][name] for p in params]

    def scales(self, group: dict, params: list[Tensor]) -> Tensor:
        """The factor s of every parameter, (parameters,)."""
        if group["rms_scale"] == "init":
            new = [p for p in params if "initial_rms" not in self.state[p]]
            for p, value in zip(new, rms(new) if new else ()):
                self.state[p]["initial_rms"] = value
            scales = torch.stack([self.state[p]["initial_rms"] for p in params])
        else:
            scales = rms(params)
        smallest: float | Tensor = SMALLEST_SCALE
        if "adapters" in group:  # of which some have their own: see relora.py
            default = scales.new_tensor(SMALLEST_SCALE)
            smallest = torch.stack([self.state[p].get("smallest_scale", default) for p in params])
        return scales.clamp_min(smallest)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["steps"] += 1
            scales = self.scales(group, params) if group["rms_scale"] else None
            lr = group["lr"] * self.bias_correction(group)
            if params[0].is_cpu:  # which gains by having done with a tensor while it is in the cache
                for p, scale in zip(params, itertools.repeat(1.0) if scales is None else scales.tolist()):
                    self.update(group, [p], lr * scale)
            else:  # a GPU gains by launching for all at once
                self.update(group, params, lr, scales)

    def update(self, group: dict, params: list[Tensor], lr: float, scales: Tensor | None = None) -> None:
        step = self.direction(group, params, [p.grad.to(wide(p)) for p in params])
        if scales is not None:
            torch._foreach_mul_(local(step), scales.unbind())
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, step, alpha=-lr)


def wide(p: Tensor) -> torch.dtype:
    """The precision of a parameter's moments and of its step: at least float32."""
    return torch.promote_types(p.dtype, torch.float32)


def square_sums(tensors: list[Tensor]) -> Tensor:
    """Sum of the squares of each tensor, all of its shards included, (tensors,)."""
    if tensors[0].is_cpu:  # where a norm runs on one thread, a dot product on all
        sums = torch.stack([torch.dot(flat, flat) for flat in (t.flatten() for t in local(tensors))])
    else:
        sums = torch.stack(torch._foreach_norm(local(tensors))).square()
    if isinstance(tensors[0], DTensor):
        dist.all_reduce(sums, group=tensors[0].device_mesh.get_group())  # one for all, where a norm makes one for each
    return sums


def rms(tensors: list[Tensor]) -> Tensor:
    """Root mean square of each tensor, (tensors,)."""
    sums = square_sums(tensors)
    return (sums / sums.new_tensor([t.numel() for t in tensors])).sqrt()


class AdamW(Optimizer):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) with decoupled decay; with rms_scale, nanoT5's AdamWScale.

    eps is added to the root of the second moment before bias correction, as Transformers 4 did; torch adds it after.
    """

    # The best of scripts/hump.py at the nano shape; T5-base was run at 2e-2 with scaling
    default_lr = {False: 3e-3, True: 3e-2}

    def __init__(self, params, lr=None, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, rms_scale=False):
        super().__init__(params, lr, weight_decay, rms_scale, betas=betas, eps=eps)

    def direction(self, group, params, grads):
        beta1, beta2 = group["betas"]
        means, squares = self.moment(params, "exp_avg"), self.moment(params, "exp_avg_sq")
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        return torch._foreach_div(means, roots)

    def bias_correction(self, group):
        beta1, beta2 = group["betas"]
        return math.sqrt(1 - beta2 ** group["steps"]) / (1 - beta1 ** group["steps"])


class Lion(Optimizer):
    """The sign of an interpolated momentum: Chen et al. 2023, arXiv:2302.06675, program 1."""

    # The best of scripts/hump.py at the nano shape; T5-base was run at 7.5e-4 with scaling
    default_lr = {False: 3e-4, True: 3e-3}

    def __init__(self, params, lr=None, betas=(0.9, 0.99), weight_decay=0.0, rms_scale=False):
        super().__init__(params, lr, weight_decay, rms_scale, betas=betas)

    def direction(self, group, params, grads):
        beta1, beta2 = group["betas"]
        means = self.moment(params, "exp_avg")
        step = torch._foreach_lerp(means, grads, 1 - beta1)
        torch._foreach_sign_(step)
        torch._foreach_lerp_(means, grads, 1 - beta2)
        return step


class Sophia(Optimizer):
    """Sophia-G, momentum over a clipped diagonal Gauss-Newton estimate: Liu et al. 2023, arXiv:2305.14342, algorithm 3.

    Every curvature_every steps, the first included, the training loop calls update_curvature() with the gradient for
    labels sampled from the model's own logits, then goes on with that for the true labels.
    """

    default_lr = {False: 1e-3, True: 3e-3}  # the best of scripts/hump.py; T5-base was run at 1e-3 with scaling

    def __init__(
        self, params, lr=None, betas=(0.965, 0.99), rho=1e-2, curvature_every=10, weight_decay=0.0, rms_scale=False
    ):
        super().__init__(params, lr, weight_decay, rms_scale, betas=betas, rho=rho)
        self.curvature_every = curvature_every

    def curvature_is_due(self):
        return self.param_groups[0]["steps"] % self.curvature_every == 0

    @torch.no_grad()
    def update_curvature(self, targets: int) -> None:
        """Take in the gradients of the mean loss over this many sampled target tokens, B in the paper.

        h holds B times the squared gradient, so that the estimate stays right when B varies.
        """
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad.to(wide(p)) for p in params]
            curvatures = self.moment(params, "curvature")
            beta2 = group["betas"][1]
            torch._foreach_mul_(curvatures, beta2)
            torch._foreach_addcmul_(curvatures, grads, grads, (1 - beta2) * targets)

    def direction(self, group, params, grads):
        means = self.moment(params, "exp_avg")
        torch._foreach_lerp_(means, grads, 1 - group["betas"][0])
        step = torch._foreach_mul(self.moment(params, "curvature"), group["rho"])
        torch._foreach_add_(step, 1e-15)
        torch._foreach_reciprocal_(step)
        torch._foreach_mul_(step, means)
        torch._foreach_clamp_min_(step, -1.0)
        torch._foreach_clamp_max_(step, 1.0)
        return step

    def diagnostics(self):
        """The share of coordinates that were not clipped: 0.1 to 0.5 is healthy, says the paper."""
        inside, coordinates = [], 0
        for group in self.param_groups:
            for state in (self.state[p] for p in group["params"] if "exp_avg" in self.state[p]):
                mean, curvature = local([state["exp_avg"], state["curvature"]])
                inside.append((mean.abs() <= group["rho"] * curvature).sum())
                coordinates += mean.numel()
        # of this process's shards; there are none while every step was a bad one
        return {"unclipped_share": torch.stack(inside).sum() / coordinates} if inside else {}


class Adafactor(Optimizer):
    """Factored second moments and clipped updates, as T5 was trained: Shazeer and Stern 2018, arXiv:1804.04235.

    The decay of the second moment is 1 - t^-0.8; lr is external; rms_scale is the paper's own parameter scaling.
    """

    default_lr = {False: 2e-3, True: 3e-2}  # with scaling, the best of scripts/hump.py; T5-base was run at 2e-2

    def __init__(self, params, lr=None, eps=1e-30, clip_threshold=1.0, weight_decay=0.0, rms_scale=True):
        super().__init__(params, lr, weight_decay, rms_scale, eps=eps, clip_threshold=clip_threshold)

    def direction(self, group, params, grads):
        beta2 = 1 - group["steps"] ** -0.8
        step = [self.whitened(p, g, g.square() + group["eps"], beta2) for p, g in zip(params, grads)]
        excess = (rms(step) / group["clip_threshold"]).clamp_min(1.0)
        torch._foreach_div_(local(step), excess.unbind())
        return step

    def whitened(self, p: Tensor, grad: Tensor, square: Tensor, beta2: float) -> Tensor:
        """grad over the root of its second moment, of which a matrix keeps only the row and column means."""
        state = self.state[p]
        if grad.dim() < 2:
            state["square"] = square.lerp(state.get("square", square), beta2)
            return grad * state["square"].rsqrt()
        rows, columns = square.mean(dim=-1), square.mean(dim=-2)
        state["rows"] = rows.lerp(state.get("rows", rows), beta2)
        state["columns"] = columns.lerp(state.get("columns", columns), beta2)
        row_scale = (state["rows"] / state["rows"].mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
        return grad * row_scale * state["columns"].rsqrt().unsqueeze(-2)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "adamwscale": functools.partial(AdamW, rms_scale=True),
    "lion": Lion,
    "sophia": Sophia,
    "adafactor": Adafactor,
}


def build(cfg, model: nn.Module) -> Optimizer:
    """The optimizer that cfg, the config's group `optim`, describes, over every parameter of the model exactly once.

    Norms and relative biases are not decayed. Adapters, if there are any, are a group of their own.
    """
    decayed, others, adapters = [], [], []
    for name, parameter in model.named_parameters():
        kind = adapters if "lora_" in name else others if "norm" in name or "bias" in name else decayed
        kind.append(parameter)
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    if adapters:
        groups.append({"params": adapters, "adapters": True})
    given = {"lr": cfg.base_lr, "rms_scale": cfg.rms_scale}
    given = {key: value for key, value in given.items() if value is not None}
    return OPTIMIZERS[cfg.name](groups, weight_decay=cfg.weight_decay, **given)


# ---------------------------------------------------------------------------------------------------------------------
# Schedules: the learning rate of step 0, 1, ..., total_steps - 1


def cosine(step: int, base_lr: float, cfg) -> float:
    """Linear from half of base_lr to base_lr over warmup_steps, then half a cosine down to final_cosine."""
    if step < cfg.optim.warmup_steps:
        return constant(step, base_lr, cfg)
    done = (step - cfg.optim.warmup_steps) / max(1, cfg.optim.total_steps - cfg.optim.warmup_steps)
    return cfg.optim.final_cosine + (base_lr - cfg.optim.final_cosine) * (1 + math.cos(math.pi * done)) / 2


def constant(step: int, base_lr: float, cfg) -> float:
    """Linear from half of base_lr to base_lr over warmup_steps, then base_lr."""
    return base_lr * min(1.0, 0.5 + 0.5 * step / max(1, cfg.optim.warmup_steps))


def legacy(step: int, base_lr: float, cfg) -> float:
    """T5's min(1e-2, 1/sqrt(step)) for nine tenths of the steps, then linear to 0; base_lr has no part in it."""
    turn = math.ceil(0.9 * cfg.optim.total_steps)
    rate = min(1e-2, 1 / math.sqrt(max(1, min(step, turn))))
    return rate if step < turn else rate * (cfg.optim.total_steps - step) / (cfg.optim.total_steps - turn)


def jagged_cosine(step: int, base_lr: float, cfg) -> float:
    """The cosine, but for relora.restart_warmup_steps after new adapters, when it rises linearly from 0 to meet it."""
    r = cfg.relora
    begun = max(r.warm_start_steps, step // r.every * r.every) if step >= r.warm_start_steps else 0
    met = begun + r.restart_warmup_steps
    if begun == 0 or step >= met:
        return cosine(step, base_lr, cfg)
    return cosine(met, base_lr, cfg) * (step - begun) / r.restart_warmup_steps


SCHEDULES = {"cosine": cosine, "constant": constant, "legacy": legacy, "jagged_cosine": jagged_cosine}
