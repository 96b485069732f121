"""Where cross-attention looks: the share of it that falls near the gap that the decoder is filling.

Span k of the targets stands between sentinel k and the next; its place in the input is that of the same sentinel. A
decoder that has learned to read the encoder attends there while it writes span k.

Shapes: B sequences, S input tokens, T target tokens, L decoder layers, H heads, V vocabulary.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoT5.model import IGNORED

NEAR = 3  # tokens on either side of the sentinel; the mean span that it stands for is as long


@dataclass
class Alignment:
    """Sums over batches; use as a context, in which it records queries and keys of every forward pass of the model."""

    t5: nn.Module  # ours or Transformers'
    sentinel_ids: Tensor  # int64 (100,): the ids of <extra_id_0>, <extra_id_1>, ...

    def __enter__(self):
        attentions = [m for name, m in self.t5.named_modules() if name.endswith("EncDecAttention")]
        self.queries, self.keys = [None] * len(attentions), [None] * len(attentions)
        self.hooks = [
            module.register_forward_hook(functools.partial(keep, store, layer))
            for layer, attention in enumerate(attentions)
            for store, module in ((self.queries, attention.q), (self.keys, attention.k))
        ]
        self.heads = self.t5.config.num_heads
        self.shares, self.chance, self.targets = 0.0, 0.0, 0
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def add(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> None:
        """Take in the forward pass just made of this batch."""
        near, text = near_own_sentinel(input_ids, labels, self.sentinel_ids)
        text &= labels != self.t5.config.eos_token_id
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        visible = attention_mask[:, None, :] != 0
        q, k = (torch.stack(store).float().unflatten(-1, (self.heads, -1)) for store in (self.queries, self.keys))
        logits = torch.einsum("lbthd,lbshd->lhbts", q, k)
        attention = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        self.shares += (attention * near).sum(-1)[..., text].double().sum(-1)  # (L, H)
        self.chance += ((near & visible).sum(-1) / visible.sum(-1))[text].double().sum()
        self.targets += text.sum()

    def result(self) -> dict:
        """Mean over target tokens: share per layer and head, and what attention spread evenly over the input has."""
        return {
            "eval/alignment": (self.shares / self.targets).tolist(),
            "eval/alignment_chance": (self.chance / self.targets).item(),
        }


def keep(store: list, layer: int, module: nn.Module, inputs: tuple, output: Tensor) -> None:
    store[layer] = output


def near_own_sentinel(input_ids: Tensor, labels: Tensor, sentinel_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(bool (B, T, S): input position s is near the sentinel of target t's span; bool (B, T): t is text of a span)."""
    span_of_label, span_of_input = ((ids[..., None] == sentinel_ids).int() for ids in (labels, input_ids))
    number = torch.arange(1, len(sentinel_ids) + 1, device=labels.device, dtype=torch.int32)
    opened = (span_of_label * number).sum(-1)  # sentinel k counts as k + 1, other tokens as 0
    place = (span_of_input * number).sum(-1)
    span = opened.cummax(-1).values
    own = (place[:, None, :] == span[:, :, None]) & (span[:, :, None] > 0)  # (B, T, S)
    distance = (torch.arange(input_ids.shape[1], device=labels.device) - own.int().argmax(-1, keepdim=True)).abs()
    near = (distance <= NEAR) & own.any(-1, keepdim=True)
    text = (labels != IGNORED) & (opened == 0) & own.any(-1)
    return near, text
