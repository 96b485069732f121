"""Where cross-attention looks: the share of it that falls near the gap that the decoder is filling.

Span k of the targets stands between sentinel k and the next; its place in the input is that of the same sentinel. A
decoder that has learned to read the encoder attends there while it writes span k. Chance is the same attention's share
near the sentinel of another span: a head that looks at all sentinels alike, or at none, has no more than that.

Shapes: B sequences, S input tokens, T target tokens, K spans, H heads.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
        device = self.sentinel_ids.device
        self.sums = torch.zeros(len(attentions), 2, self.t5.config.num_heads, dtype=torch.float64, device=device)
        self.targets = torch.zeros((), dtype=torch.float64, device=device)
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def add(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> None:
        """Take in the forward pass just made of this batch."""
        span, near = spans(input_ids, labels, self.sentinel_ids)
        others = near.any(-1).sum(-1, keepdim=True) - 1  # (B, 1)
        # text of a span, in a sequence that has another
        text = (span >= 0) & (labels != self.t5.config.eos_token_id) & (others > 0)
        own = F.one_hot(span.clamp(min=0), near.shape[1])[:, None]  # (B, 1, T, K)
        for layer, projections in enumerate(zip(self.queries, self.keys)):
            q, k = (x.float().unflatten(-1, (self.sums.shape[-1], -1)).transpose(1, 2) for x in projections)
            logits = q @ k.transpose(-1, -2)  # (B, H, T, S)
            if attention_mask is not None:
                logits = logits.masked_fill(attention_mask[:, None, None, :] == 0, -torch.inf)
            share = logits.softmax(-1) @ near[:, None].mT.float()  # (B, H, T, K)
            aligned = (share * own).sum(-1)
            elsewhere = (share.sum(-1) - aligned) / others[:, None].clamp(min=1)
            for i, value in enumerate((aligned, elsewhere)):
                self.sums[layer, i] += (value * text[:, None]).sum(dim=(0, 2), dtype=torch.float64)
        self.targets += text.sum()

    def result(self, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, list[list[float]]]:
        """Means over target tokens, for each layer and head; nothing where no sequence has two spans.

        reduce: adds up the sums of all processes.
        """
        sums, targets = reduce(self.sums), reduce(self.targets)
        if not targets:
            return {}
        aligned, elsewhere = (sums / targets).unbind(1)
        return {"eval/alignment": aligned.tolist(), "eval/alignment_chance": elsewhere.tolist()}


def keep(store: list, layer: int, module: nn.Module, inputs: tuple, output: Tensor) -> None:
    store[layer] = output


def spans(input_ids: Tensor, labels: Tensor, sentinel_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 (B, T): the span that a target is text of, else -1; bool (B, K, S): near the sentinel of span k)."""

    def number(ids: Tensor) -> Tensor:
        matches = ids[..., None] == sentinel_ids
        return torch.where(matches.any(-1), matches.int().argmax(-1), -1)

    opened, place = number(labels), number(input_ids)
    span = opened.cummax(-1).values.masked_fill((opened >= 0) | (labels == IGNORED), -1)
    sentinel = place[:, None, :] == torch.arange(int(place.max()) + 1, device=place.device)[:, None]  # (B, K, S)
    near = F.max_pool1d(sentinel.float(), 2 * NEAR + 1, stride=1, padding=NEAR) > 0
    return span, near
