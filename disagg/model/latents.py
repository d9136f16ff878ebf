"""Multi-head latent attention (MLA): a layer keeps one latent of a token, not K and V of heads.

    a token      │ latent c, r channels │ rotated key, d channels │
    K of pages   │ all of it, as the only KV head                 │   V is its first r channels

    prompts      K and V of all heads are expanded from latents, for one layer at a time
    new tokens   queries ask latents: q k = (q_n W_k) c + q_r k_r, and the output is (p c) W_v

Attention modules of transformers expand latents with a method. `keep_latents` replaces it, so that
our attention function gets latents, and expands them only for prompts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from disagg.errors import ModelError
from disagg.kv.plan import LayerShape

EXPANSION = "expand_kv"  # the method: of latents and rotated keys, K and V of all heads
LEAST_TRANSFORMERS = "5.24"  # the first whose modules have it
Pair = tuple[Tensor, Tensor]


class Heads(Protocol):
    """How the query heads of a module see K and V of pages.

    value_dim: channels of the output of a head; None: those of V in pages
    """

    value_dim: int | None

    def expand(self, k: Tensor, v: Tensor) -> Pair:
        """K and V [H, n, D] for prompts from those of pages; V may have fewer channels."""

    def ask(self, q: Tensor) -> Tensor:
        """q [Hq, N, D] of the module as it asks pages."""

    def answer(self, o: Tensor) -> Tensor:
        """What attention to pages gives, [N, Hq, ...], as the output of the module's heads."""


class PlainHeads:
    """Heads whose K and V are in pages as they are."""

    value_dim: int | None = None

    def expand(self, k: Tensor, v: Tensor) -> Pair:
        return k, v

    def ask(self, q: Tensor) -> Tensor:
        return q

    def answer(self, o: Tensor) -> Tensor:
        return o


class LatentHeads:
    """The heads of a module that keeps latents; called in place of its expansion.

    r, d: channels of a latent and of a rotated key; n, d: of a query, without and with rotation
    """

    def __init__(self, module: Any, dtype: torch.dtype):
        self._expand = getattr(module, EXPANSION)
        plain_dim: int = module.qk_nope_head_dim
        value_dim: int = module.v_head_dim
        self.value_dim: int | None = value_dim
        weights = _weights_of(module.kv_b_proj, module.kv_lora_rank, dtype)
        by_head = weights.unflatten(0, (-1, plain_dim + value_dim))
        self._plain_dim = plain_dim
        self._keys = by_head[:, :plain_dim]  # W_k [H, n, r]
        self._values = by_head[:, plain_dim:]  # W_v [H, v, r]

    def __call__(self, latents: Tensor, rotated: Tensor) -> Pair:
        """[1, 1, N, r] and [1, 1, N, d] to K [1, 1, N, r + d] and V [1, 1, N, r]."""
        k = torch.cat([latents, rotated], -1)
        return k, k[..., : latents.shape[-1]]

    def expand(self, k: Tensor, v: Tensor) -> Pair:
        rotated = k[..., v.shape[2] :]
        keys, values = self._expand(v[None], rotated[None])
        return keys[0], values[0]

    def ask(self, q: Tensor) -> Tensor:
        plain, rotated = q[..., : self._plain_dim], q[..., self._plain_dim :]
        return torch.cat([plain @ self._keys, rotated], -1)

    def answer(self, o: Tensor) -> Tensor:
        values = o.transpose(0, 1) @ self._values.transpose(1, 2)
        return values.transpose(0, 1)


PLAIN = PlainHeads()


def keep_latents(model: PreTrainedModel, layers: Sequence[LayerShape]) -> None:
    """Let the attention modules of a model give their latents to our attention.

    ModelError unless the layers with latents are as many as the modules that expand some.
    """
    modules = _latent_modules(model)
    count = sum(layer.latent is not None for layer in layers)
    if len(modules) != count:
        raise ModelError(
            f"{type(model).__name__} expands latents in {len(modules)} modules, in {count} by "
            f"its config: not supported; latents need transformers {LEAST_TRANSFORMERS} or "
            f"later, this is {transformers.__version__}"
        )
    for module in modules:
        setattr(module, EXPANSION, LatentHeads(module, model.dtype))


@contextmanager
def own_expansion(model: nn.Module) -> Iterator[None]:
    """A model as transformers made it, which expands latents before it attends."""
    replaced = [
        (module, heads)
        for module in _latent_modules(model)
        if (heads := heads_of(module)) is not PLAIN
    ]
    for module, _ in replaced:
        delattr(module, EXPANSION)
    try:
        yield
    finally:
        for module, heads in replaced:
            setattr(module, EXPANSION, heads)


def heads_of(module: nn.Module) -> Heads:
    """How the heads of an attention module see pages."""
    heads = getattr(module, EXPANSION, None)
    return heads if isinstance(heads, LatentHeads) else PLAIN


def _latent_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, EXPANSION)]


def _weights_of(linear: Any, inputs: int, dtype: torch.dtype) -> Tensor:
    """The weights [out, in] of a linear layer without bias, also of one that keeps them packed."""
    if type(linear) is nn.Linear:
        weight: Tensor = linear.weight.detach()
        return weight
    one_each = torch.eye(inputs, dtype=dtype, device=linear.weight.device)
    with torch.inference_mode():
        columns: Tensor = linear(one_each)
    return columns.T
