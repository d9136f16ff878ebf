"""The forward pass of models that are Llama in form, with fewer and larger operations.

    x = embedding of the tokens; cosines and sines of their positions, once for all layers
    each layer     x = x + o(attention(rotate(q), rotate(k), v))   q, k and v: one product
                   x = x + down(act(gate) * up)                    gate and up: one product
    logits = head(norm(x))

transformers makes some 25 calls of Python a layer for the same, which is a third of a step where a
CPU decodes few tokens. Layers without gates, such as mixtures of experts, stay its modules.

The weights are those of the loaded model: its own projections become views of the fused ones. So it
still computes, and `llama_forward` compares the two before the model is let go.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm
from transformers.activations import SiLUActivation

from disagg.kernels.rows import Rotation, add_and_norm, gate, rotate
from disagg.kernels.view import Softmax
from disagg.model.attention import Attention, attend_exact
from disagg.model.linear import pad_rows, padded_rows
from disagg.model.shards import Summed

# model types that this forward pass was written for; each has a test
LLAMA_LIKE = {
    "granite",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
}
# largest difference of a logit from the module's, in parts of the largest logit
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
PROBE_TOKENS = 24

Transform = Callable[[Tensor], Tensor]


class RootMeanSquare:
    """A norm of transformers that is a root mean square with weights."""

    def __init__(self, norm: Any):
        self._weight: Tensor = norm.weight
        self._epsilon: float = norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """x: [N, columns]."""
        return self.behind_sum(x, None)[1]

    def behind_sum(
        self, x: Tensor, more: Tensor | None, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """x + factor * more, and its norm."""
        return add_and_norm(x, more, self._weight, self._epsilon, factor)


class OtherNorm:
    """Any other norm of transformers: its module."""

    def __init__(self, norm: Transform):
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        """x: [N, columns]."""
        return self._norm(x)

    def behind_sum(
        self, x: Tensor, more: Tensor | None, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """x + factor * more, and its norm."""
        if more is not None:
            x = torch.add(x, more, alpha=factor)
        return x, self._norm(x)


Norm = RootMeanSquare | OtherNorm


def norm_of(module: Any) -> Norm:
    """A norm of transformers, in one operation where it is a root mean square with weights."""
    has_weight = getattr(module, "weight", None) is not None
    if has_weight and hasattr(module, "variance_epsilon"):
        return RootMeanSquare(module)
    return OtherNorm(module)


def norm_by_head(attention: Any, query_heads: int, heads: int) -> Transform:
    """The norm of q and k [N, Hq + H, D], each head by itself."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    weight = torch.stack([q_norm.weight] * query_heads + [k_norm.weight] * heads)
    shape = weight.shape[1:]
    epsilon = q_norm.variance_epsilon
    return lambda qk: rms_norm(qk, shape, eps=epsilon).mul_(weight)


def norm_of_all_heads(attention: Any, query_heads: int, heads: int) -> Transform:
    """The norm of q and k [N, Hq + H, D], all heads of q together, and all of k."""
    q_norm = norm_of(attention.q_norm)
    k_norm = norm_of(attention.k_norm)

    def norm(qk: Tensor) -> Tensor:
        q, k = qk.split([query_heads, heads], 1)
        normalized = [q_norm(q.flatten(1)), k_norm(k.flatten(1))]
        return torch.cat(normalized, 1).view_as(qk)

    return norm


class LlamaAttention(nn.Module):
    """The projections, norms and rotation around the attention of a step."""

    def __init__(self, attention: Any):
        super().__init__()
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = fused(*projections)
        self.out = attention.o_proj
        self.head_dim: int = attention.head_dim
        query_heads, heads, _ = (x.out_features // self.head_dim for x in projections)
        self.query_heads = query_heads
        self.rotated_heads = query_heads + heads
        self.norm: Transform | None = None
        if getattr(attention, "q_norm", None) is not None:
            is_by_head = attention.q_norm.weight.numel() == self.head_dim
            norm = norm_by_head if is_by_head else norm_of_all_heads
            self.norm = norm(attention, query_heads, heads)
        self.softmax = Softmax(attention.scaling)
        self.is_rotated = bool(getattr(attention, "use_rope", True))

    def forward(self, x: Tensor, rotation: Rotation, attend: Attention) -> Tensor:
        """x [M, hidden] -> [M, hidden], of which N rows have a rotation, and attend."""
        count = len(rotation[0])
        heads = self.qkv(x).view(len(x), -1, self.head_dim)[:count]
        qk = heads[:, : self.rotated_heads]
        v = heads[:, self.rotated_heads :].transpose(0, 1)
        if self.norm is not None:
            qk = self.norm(qk)
        if self.is_rotated:
            qk = rotate(qk, rotation)
        q = qk[:, : self.query_heads].transpose(0, 1)
        k = qk[:, self.query_heads :].transpose(0, 1)
        attended = attend(self, q, k, v, self.softmax, {"attention_mask": None})
        out: Tensor = self.out(pad_rows(attended.flatten(1), len(x)))
        return out


class GatedMLP(nn.Module):
    """down(act(gate) * up)."""

    def __init__(self, mlp: Any):
        super().__init__()
        self.gate_up = fused(mlp.gate_proj, mlp.up_proj)
        self.act = mlp.act_fn
        self.is_silu = isinstance(mlp.act_fn, SiLUActivation | nn.SiLU)
        self.down = mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        out: Tensor = self.down(gate(both) if self.is_silu else self._gated(both))
        return out

    def _gated(self, both: Tensor) -> Tensor:
        first, second = both.chunk(2, -1)
        gated: Tensor = self.act(first) * second
        return gated


class ModuleMLP(nn.Module):
    """A module of transformers in place of the MLP, such as a mixture of experts."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x[None])
        return out[0]


class LlamaLayer(nn.Module):
    """Attention and MLP, each added to its input.

    norms: before attention and MLP, or behind them
    factor: what is added is multiplied by it
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.attention = LlamaAttention(layer.self_attn)
        is_gated = hasattr(layer.mlp, "gate_proj")
        self.mlp = GatedMLP(layer.mlp) if is_gated else ModuleMLP(layer.mlp)
        self.is_norm_behind = hasattr(layer, "post_feedforward_layernorm")
        if self.is_norm_behind:
            norms = layer.post_attention_layernorm, layer.post_feedforward_layernorm
        else:
            norms = layer.input_layernorm, layer.post_attention_layernorm
        self.norms = [norm_of(norm) for norm in norms]
        self.factor: float = getattr(layer, "residual_multiplier", 1.0)

    def forward(
        self, x: Tensor, more: Tensor | None, rotation: Rotation, attend: Attention
    ) -> tuple[Tensor, Tensor]:
        """x [N, hidden] with attention added; and what the MLP gives, still to be added.

        more: what the layer before gives, still to be added to x
        """
        attention_norm, mlp_norm = self.norms
        if self.is_norm_behind:
            if more is not None:
                x = x + more
            x = x + attention_norm(self.attention(x, rotation, attend))
            return x, mlp_norm(self.mlp(x))
        x, normalized = attention_norm.behind_sum(x, more, self.factor)
        attended = self.attention(normalized, rotation, attend)
        x, normalized = mlp_norm.behind_sum(x, attended, self.factor)
        return x, self.mlp(normalized)


class LlamaForward(nn.Module):
    """A model that is Llama in form."""

    def __init__(self, model: Any):
        super().__init__()
        decoder = model.model
        self.embedding = decoder.embed_tokens
        self.embedding_factor: float = getattr(decoder, "embedding_multiplier", 1.0)
        self.rotary = decoder.rotary_emb
        layers = [*map(LlamaLayer, decoder.layers)]
        self.layers = nn.ModuleList(layers)
        self.factor = layers[-1].factor
        self.norm = norm_of(decoder.norm)
        self.head = model.lm_head
        self.logits_divisor: float = getattr(model.config, "logits_scaling", 1.0)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attention,
        _: object = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The logits of a packed row of N tokens: [N, V], or those of some rows only.

        Layers have no states, so no cache is used.

        tokens, positions, rows: int64
        """
        # behind the tokens are rows that nothing reads
        padding = padded_rows(len(tokens)) - len(tokens)
        x = self.embedding(pad(tokens, (0, padding)))
        if self.embedding_factor != 1:
            x = x * self.embedding_factor
        rotation = self._rotation(x, positions)
        more: Tensor | None = None
        for layer in self.layers:
            x, more = layer(x, more, rotation, attend)
        if rows is None:
            rows = torch.arange(len(tokens), device=x.device)
        x = x[rows]
        more = None if more is None else more[rows]
        _, normalized = self.norm.behind_sum(x, more, self.factor)
        logits: Tensor = self.head(normalized)
        return logits if self.logits_divisor == 1 else logits / self.logits_divisor

    def _rotation(self, x: Tensor, positions: Tensor) -> Rotation:
        cos, sin = self.rotary(x, positions[None])
        half = sin.shape[2] // 2
        signed_sin = torch.cat([-sin[..., :half], sin[..., half:]], 2)
        return cos[0], signed_sin[0]


def fused(*linears: nn.Linear) -> nn.Linear:
    """One linear layer that computes several of one input; theirs become views of its weights."""
    sizes = [linear.out_features for linear in linears]
    first = linears[0]
    has_bias = first.bias is not None
    joined = nn.Linear(first.in_features, sum(sizes), bias=has_bias, device="meta")
    for name in ("weight", "bias") if has_bias else ("weight",):
        values = torch.cat([getattr(linear, name) for linear in linears])
        setattr(joined, name, nn.Parameter(values, requires_grad=False))
        for linear, part in zip(linears, values.split(sizes), strict=True):
            setattr(linear, name, nn.Parameter(part, requires_grad=False))
    return joined


def llama_forward(model: Any) -> LlamaForward | None:
    """The forward pass of a model that is Llama in form; None for another model.

    It takes the layers of the model, so that no weight is in memory twice. Where None is returned,
    the model still computes.
    """
    if not is_llama_like(model):
        return None
    forward = LlamaForward(model).eval()
    if not _agrees(forward, model):
        return None
    model.model.layers = nn.ModuleList()
    return forward


def is_llama_like(model: Any) -> bool:
    """Whether `LlamaForward` can compute a model of transformers."""
    config = model.config
    if config.model_type not in LLAMA_LIKE or getattr(config, "clip_qkv", None):
        return False
    linears = [
        getattr(layer.self_attn, name)
        for layer in model.model.layers
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ]
    return all(type(linear) in (nn.Linear, Summed) for linear in linears)


def _agrees(forward: LlamaForward, model: Any) -> bool:
    """Whether both give the same logits for a prompt, with attention to all of it."""
    tokens = torch.arange(PROBE_TOKENS, device=model.device)
    tokens = tokens.mul(7919).remainder(model.config.vocab_size)
    positions = torch.arange(PROBE_TOKENS, device=model.device)
    expected = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        disagg=attend_to_all,
        use_cache=False,
    ).logits[0]
    logits = forward(tokens, positions, attend_to_all)
    error = (logits - expected).abs().max() / expected.abs().max()
    return bool(error <= TOLERANCE[logits.dtype])


def attend_to_all(
    _module: nn.Module, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, _: dict
) -> Tensor:
    return attend_exact(q, k, v, softmax, None).transpose(0, 1).contiguous()
