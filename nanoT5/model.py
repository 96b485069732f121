"""T5 v1.1 in plain torch, with the parameter names of transformers.T5ForConditionalGeneration.

Architecture: Raffel et al. 2020 (arXiv:1910.10683); gated GELU: Shazeer 2020 (arXiv:2002.05202). As in T5, norms only
scale (RMS), linear maps have no bias, queries are not divided by sqrt(d_kv), and one relative position bias per stack
is shared by its layers. Unlike T5 1.0, the output head is a matrix of its own.

Shapes: B sequences, S input tokens, T target tokens, D d_model, H heads, K d_kv, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config

IGNORED = -100  # a label at which there is no loss: padding


class Output(NamedTuple):
    loss: Tensor  # mean cross-entropy in nats over the labels that are not IGNORED, float32 scalar
    logits: Tensor | None  # (B, T, V); None in training, which does not need them


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis. Its input is the residual stream, float32 under autocast too."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.eps = config.layer_norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FeedForward(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.dropout(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)))


class Attention(nn.Module):
    def __init__(self, config: T5Config, relative_bias: bool = False):
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        if relative_bias:
            self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.d_kv, self.dropout = config.d_kv, config.dropout_rate

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        """x (B, T, D) attends to memory (B, S, D); bias, broadcast to (B, H, T, S), is added to the logits."""
        q, k, v = (
            projection(source).unflatten(-1, (-1, self.d_kv)).transpose(1, 2)
            for projection, source in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        if bias is not None:
            bias = bias.to(q.dtype)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return self.o(mixed.transpose(1, 2).flatten(2))


def relative_buckets(length: int, bidirectional: bool, buckets: int, max_distance: int, device) -> Tensor:
    """Bucket of every (query, key) offset, int64 (length, length); Raffel et al. 2020, section 2.1.

    Half of the buckets hold one small distance each, the other half grow logarithmically up to max_distance. An encoder
    (bidirectional) spends half of all buckets on keys to the right; a decoder puts those into bucket 0.
    """
    position = torch.arange(length, device=device)
    offset = position[None, :] - position[:, None]  # key - query
    side: int | Tensor = 0
    if bidirectional:
        buckets //= 2
        side = (offset > 0) * buckets
        distance = offset.abs()
    else:
        distance = (-offset).clamp(min=0)
    exact = buckets // 2
    scale = (buckets - exact) / math.log(max_distance / exact)
    far = exact + (torch.log(distance.clamp(min=1).float() / exact) * scale).long()
    return side + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class SelfAttentionLayer(nn.Module):
    def __init__(self, config: T5Config, relative_bias: bool):
        super().__init__()
        self.SelfAttention = Attention(config, relative_bias)
        self.layer_norm = RMSNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        normed = self.layer_norm(x)
        return x + self.dropout(self.SelfAttention(normed, normed, bias))


class CrossAttentionLayer(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.EncDecAttention = Attention(config)
        self.layer_norm = RMSNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        return x + self.dropout(self.EncDecAttention(self.layer_norm(x), memory, bias))


class FeedForwardLayer(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.DenseReluDense = FeedForward(config)
        self.layer_norm = RMSNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.DenseReluDense(self.layer_norm(x)))


class Block(nn.Module):
    """One layer of the encoder (self-attention, feed-forward) or of the decoder (cross-attention between the two)."""

    def __init__(self, config: T5Config, decoder: bool, relative_bias: bool):
        super().__init__()
        self.layer = nn.ModuleList([SelfAttentionLayer(config, relative_bias)])
        if decoder:
            self.layer.append(CrossAttentionLayer(config))
        self.layer.append(FeedForwardLayer(config))

    def forward(self, x: Tensor, self_bias: Tensor, memory: Tensor | None, memory_bias: Tensor | None) -> Tensor:
        x = self.layer[0](x, self_bias)
        if memory is not None:
            x = self.layer[1](x, memory, memory_bias)
        return self.layer[-1](x)


class Stack(nn.Module):
    """Encoder or decoder: (B, S) token ids to (B, S, D) hidden states."""

    def __init__(self, config: T5Config, embed_tokens: nn.Embedding, decoder: bool):
        super().__init__()
        layers = config.num_decoder_layers if decoder else config.num_layers
        self.embed_tokens = embed_tokens
        self.block = nn.ModuleList(Block(config, decoder, relative_bias=i == 0) for i in range(layers))
        self.final_layer_norm = RMSNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.decoder = decoder
        self.buckets, self.max_distance = config.relative_attention_num_buckets, config.relative_attention_max_distance

    def self_bias(self, length: int, device) -> Tensor:
        """Relative position bias (1, H, length, length), with -inf above the diagonal in a decoder."""
        buckets = relative_buckets(length, not self.decoder, self.buckets, self.max_distance, device)
        bias = self.block[0].layer[0].SelfAttention.relative_attention_bias(buckets).permute(2, 0, 1)[None]
        if self.decoder:
            future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
            bias = bias.masked_fill(future, -math.inf)
        return bias

    def forward(self, ids: Tensor, padding_bias: Tensor | None, memory: Tensor | None = None) -> Tensor:
        """padding_bias: (B, 1, 1, S), 0 at input tokens and very negative at padding, or None where nothing is padded.

        It hides padded inputs from the encoder's self-attention and from the decoder's cross-attention.
        """
        self_bias = self.self_bias(ids.shape[1], ids.device)
        if padding_bias is not None and not self.decoder:
            self_bias = self_bias + padding_bias
        x = self.dropout(self.embed_tokens(ids))
        for block in self.block:
            x = block(x, self_bias, memory, padding_bias)
        return self.dropout(self.final_layer_norm(x))


class T5(nn.Module):
    def __init__(self, config: T5Config):
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Stack(config, self.shared, decoder=False)
        self.decoder = Stack(config, self.shared, decoder=True)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None, draws: Tensor | None = None
    ) -> Output:
        """Loss of one batch, and in evaluation its logits.

        input_ids: int64 (B, S). labels: int64 (B, T), IGNORED at padding; shifted right, they are the decoder's inputs.
        attention_mask: (B, S), nonzero at tokens and 0 at padding; None where nothing is padded, which is faster.
        draws: (B, T), in training: the loss is against drawn_labels() and not against labels.
        """
        padding_bias = None
        if attention_mask is not None:
            hidden = (attention_mask == 0)[:, None, None, :]
            padding_bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -1e9)
        memory = self.encoder(input_ids, padding_bias)
        hidden = self.decoder(self.shift_right(labels), padding_bias, memory)
        if self.training:
            return Output(HeadLoss.apply(hidden, self.lm_head.weight, labels, draws), None)
        logits = self.lm_head(hidden)
        return Output(cross_entropy(logits, labels), logits)

    def shift_right(self, labels: Tensor) -> Tensor:
        shifted = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id)
        return shifted.masked_fill(shifted == IGNORED, self.config.pad_token_id)


class HeadLoss(torch.autograd.Function):
    """cross_entropy(hidden @ head.T, labels), of whose logits only some rows at a time are in memory.

    Their gradient, softmax minus one-hot, is made in the forward pass out of the logits themselves, where they lie. It
    makes nano's step 1.02 to 1.07 times as fast on a CPU; of T5-base, the logits of 128 sequences would be
    1.9 GB, three times.
    """

    ROWS = 1024  # at a time: enough for a matrix product to be fast, 132 MB of float32 at T5's vocabulary

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, labels: Tensor, draws: Tensor | None) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        narrow_hidden, narrow_head = hidden.flatten(0, 1).to(dtype), head.to(dtype)
        hidden_grad, head_grad = torch.empty_like(narrow_hidden), torch.zeros_like(head)
        targets = (labels != IGNORED).sum()
        loss = wide(hidden.new_zeros(()))
        for first in range(0, len(narrow_hidden), HeadLoss.ROWS):
            rows = slice(first, first + HeadLoss.ROWS)
            logits = wide(narrow_hidden[rows] @ narrow_head.T)
            chosen = labels.flatten()[rows]
            if draws is not None:
                chosen = drawn_labels(logits, chosen, draws.flatten()[rows])
            share, chosen = (chosen != IGNORED).to(logits.dtype)[:, None] / targets, chosen.clamp_min(0)[:, None]
            logits -= logits.amax(-1, keepdim=True)
            likelihood = logits.gather(-1, chosen)
            total = logits.exp_().sum(-1, keepdim=True)
            loss += ((total.log() - likelihood) * share).sum()
            logits *= share / total
            logits.scatter_add_(-1, chosen, -share)
            logits_grad = logits.to(dtype)
            hidden_grad[rows] = logits_grad @ narrow_head
            head_grad += logits_grad.T @ narrow_hidden[rows]
        ctx.save_for_backward(hidden_grad.view_as(hidden).to(hidden.dtype), head_grad)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad * grad, head_grad * grad, None, None


def wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean in nats over the labels that are not IGNORED, at least float32. logits: (B, T, V), labels: (B, T)."""
    return F.cross_entropy(wide(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def drawn_labels(logits: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
    """Labels drawn from what the logits predict, IGNORED where labels are.

    The gradient of the loss against them, squared, is Sophia's Gauss-Newton-Bartlett estimate: Liu et al. 2023,
    arXiv:2305.14342, algorithm 2. draws: as labels, in [0, 1), the place in each distribution's cumulative sum.
    """
    cumulative = wide(logits.detach()).softmax(-1).cumsum(-1)
    drawn = torch.searchsorted(cumulative, draws[..., None] * cumulative[..., -1:], right=True).squeeze(-1)
    return drawn.clamp(max=logits.shape[-1] - 1).masked_fill(labels == IGNORED, IGNORED)


def hf_t5(config: T5Config) -> nn.Module:
    """Transformers' T5, called as ours is, with a head of its own: Transformers 5 ties it whatever the config says."""
    from transformers import T5ForConditionalGeneration  # takes seconds

    class TransformersT5(T5ForConditionalGeneration):
        def forward(self, input_ids, labels, attention_mask=None, draws=None) -> Output:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
            logits = super().forward(labels=labels, **inputs).logits
            return Output(
                cross_entropy(logits, labels if draws is None else drawn_labels(logits, labels, draws)), logits
            )

    model = TransformersT5(config)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


CLASSES = {"local_t5": T5, "hf_t5": hf_t5}


def t5_config(vocab_size: int, pad_id: int, eos_id: int, **shape) -> T5Config:
    """The T5 v1.1 config of these shapes (T5Config's names), with a vocabulary rounded up to a multiple of 128."""
    return T5Config(
        vocab_size=math.ceil(vocab_size / 128) * 128,
        pad_token_id=pad_id,
        eos_token_id=eos_id,
        decoder_start_token_id=pad_id,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        **shape,
    )


# Standard deviations, by the name of a weight's module, as functions of the config and of model.init_std
HF = {
    "shared": lambda c, std: 1.0,
    "lm_head": lambda c, std: 1.0,
    "q": lambda c, std: (c.d_model * c.d_kv) ** -0.5,  # stands in for the division by sqrt(d_kv) that T5 omits
    "k": lambda c, std: c.d_model**-0.5,
    "v": lambda c, std: c.d_model**-0.5,
    "o": lambda c, std: (c.num_heads * c.d_kv) ** -0.5,
    "relative_attention_bias": lambda c, std: c.d_model**-0.5,
    "wi_0": lambda c, std: c.d_model**-0.5,
    "wi_1": lambda c, std: c.d_model**-0.5,
    "wo": lambda c, std: c.d_ff**-0.5,
}
T5_OWN = HF | {"lm_head": lambda c, std: c.d_model**-0.5}
INITIALIZATIONS = {
    "hf": HF,
    "t5": T5_OWN,
    "small_embedding": T5_OWN | {"shared": lambda c, std: SMALL / math.sqrt(3)},
    "uniform": dict.fromkeys(HF, lambda c, std: std),
}
SMALL = 1e-4  # half width of RWKV's SmallInitEmb


def initial_distributions(
    config: T5Config, init: str, init_std: float, init_distribution: str, std: dict[str, float | None] | None = None
) -> dict[str, tuple[str, float]]:
    """Distribution ("normal" or "uniform") and standard deviation of every class of weight, by module name.

    init: "hf", the mixed initialization of Transformers' T5; "t5", that of T5's own code, whose head is smaller;
    "uniform", init_std for all; "small_embedding", T5's with embeddings uniform within 1e-4, which is RWKV's
    SmallInitEmb and goes with add_embedding_norm. std: of single classes, where not None, instead.
    """
    stds = {kind: (std or {}).get(kind) or rule(config, init_std) for kind, rule in INITIALIZATIONS[init].items()}
    distributions = dict.fromkeys(stds, init_distribution)
    if init == "small_embedding":
        distributions["shared"] = "uniform"
    return {kind: (distributions[kind], value) for kind, value in stds.items()}


@torch.no_grad()
def initialize(model: nn.Module, distributions: dict[str, tuple[str, float]], seed: int) -> None:
    """Draw every parameter anew, each class from its own distribution; norms become 1. A function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device gets the same weights
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-2]
        if kind.endswith("norm"):
            parameter.fill_(1.0)
        elif kind in distributions:
            distribution, std = distributions[kind]
            drawn = torch.empty(parameter.shape)
            if distribution == "normal":
                drawn.normal_(0.0, std, generator=generator)
            else:
                half_width = math.sqrt(3) * std
                drawn.uniform_(-half_width, half_width, generator=generator)
            parameter.copy_(drawn)
        else:
            raise LookupError(f"no initialization rule for {name}: add one to initial_distributions")


class NormedEmbedding(nn.Embedding):
    """An embedding with a norm right after it, which lets it be tiny at the start: a step changes its direction.

    At 1e-4 the norm's epsilon is most of what it divides by, as it is in RWKV: the first embeddings come out of it with
    an RMS of 0.06, and the more they grow the nearer that comes to 1.
    """

    def __init__(self, config: T5Config):
        super().__init__(config.vocab_size, config.d_model)
        self.norm = RMSNorm(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(super().forward(ids))


def add_embedding_norm(model: nn.Module, config: T5Config) -> None:
    """Norm the embeddings of encoder and decoder, in either class of model, as init=small_embedding needs it."""
    model.shared = model.encoder.embed_tokens = model.decoder.embed_tokens = NormedEmbedding(config)


@torch.no_grad()
def blind(model: nn.Module) -> None:
    """Cut the encoder off for good: the decoder's cross-attention adds nothing, and learns nothing."""
    for name, parameter in model.named_parameters():
        if name.endswith("EncDecAttention.o.weight"):
            parameter.zero_()
            parameter.requires_grad_(False)
