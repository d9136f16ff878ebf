"""The attention function that models call: exact for prompts, on compressed pages for new tokens.

A forward pass has one packed row of tokens; the `Batch` that comes along as keyword argument says
which of them are chunks of prompts and which decode:

    rows       │ chunk of prompt A │ chunk of prompt B │ c │ d │ e e e e │
    attention    exact, own prompt   exact, own prompt   pages and tail of c, d, e (e: replay)

Registered with transformers as "disagg"; it has no mask function there, so models build no mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from disagg.codecs.base import Codec
from disagg.codecs.layer import StepLayers
from disagg.codecs.tables import GroupStep
from disagg.errors import ModelError
from disagg.model.cache import Workspace

IMPLEMENTATION = "disagg"

# layer, k [H, done, D], v [H, done, D]: exact K and V so far; before: tokens of earlier calls
Sink = Callable[[int, Tensor, Tensor, int], None]


class Attention(Protocol):
    """What answers an attention call of a model."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, options: dict
    ) -> Tensor:
        """q [Hq, N, D], k and v [H, N, D] of a packed row of N tokens -> [N, Hq, D]."""


@dataclass(frozen=True)
class Chunk:
    """Rows `row` .. `row + count - 1`: tokens `before` .. of one prompt.

    sink: called with the exact K and V so far, as soon as a layer has attended
    """

    row: int
    count: int
    before: int
    workspace: Workspace
    sink: Sink


@dataclass(frozen=True)
class Decode:
    """What one layer group's decoding rows do in a step, and the codec of its pages.

    whole: the rows of the step are all rows of the batch, in order: nothing need be picked out
    """

    codec: Codec
    step: GroupStep
    whole: bool = False


@dataclass(frozen=True)
class Batch:
    """One forward pass over a packed row of tokens.

    tokens, positions: one per row · outputs: rows whose logits are wanted
    arena: [bytes] u8 - where the pages of `decodes` are
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    outputs: Sequence[int]
    arena: Tensor
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()

    @cached_property
    def by_layer(self) -> dict[int, list[tuple[Decode, StepLayers]]]:
        """The decodes that take part in each layer."""
        found: dict[int, list[tuple[Decode, StepLayers]]] = {}
        for decode in self.decodes:
            layers = StepLayers(decode.codec, decode.step, self.arena)
            for layer in decode.step.group.layers:
                found.setdefault(layer, []).append((decode, layers))
        return found


@dataclass(frozen=True)
class BatchAttention:
    """Answers every attention call of one forward pass.

    windows: per layer, the tokens a query sees, itself included; None: all
    """

    batch: Batch
    windows: Sequence[int | None]

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, options: dict
    ) -> Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        decodes = self.batch.by_layer.get(layer, [])
        if len(decodes) == 1 and decodes[0][0].whole:
            return decodes[0][1].run(layer, q, k, v, scale)
        out = q.new_zeros(q.shape[1], q.shape[0], q.shape[2])
        for chunk in self.batch.chunks:
            rows = slice(chunk.row, chunk.row + chunk.count)
            exact = chunk.workspace.extend(layer, k[:, rows], v[:, rows], chunk.before)
            window = self.windows[layer]
            out[rows] = attend_exact(q[:, rows], *exact, scale, window).transpose(0, 1)
            chunk.workspace.observe(layer, q[:, rows], chunk.before)
            chunk.sink(layer, *exact, chunk.before)
        for decode, layers in decodes:
            picked = decode.step.rows
            some_q, some_k, some_v = (x[:, picked] for x in (q, k, v))
            attended = layers.run(layer, some_q, some_k, some_v, scale)
            out.index_add_(0, picked, attended)  # padding adds 0, see static.py
        return out


def attend_exact(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of the last c of n tokens: q [Hq, c, D], k and v [H, n, D] -> [Hq, c, D].

    window: tokens a query sees, itself included; None: all of them
    """
    count = q.shape[1]
    if window is not None:
        k, v = (x[:, -(count + window - 1) :] for x in (k, v))
    total = k.shape[1]
    whole = window is None or window >= total
    if count == total and whole:
        mask = None
    else:
        positions = torch.arange(total, device=q.device)
        query = positions[total - count :, None]
        mask = positions <= query
        if window is not None and not whole:
            mask &= positions > query - window
        repeats = q.shape[0] // k.shape[0]  # with a mask, grouped heads fall back to slow kernels
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    out = scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None and count > 1,
        scale=scale,
        enable_gqa=q.shape[0] != k.shape[0],
    )
    return out[0]


def disagg_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    disagg: Attention | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: query [1, Hq, N, D] -> [1, N, Hq, D]."""
    if disagg is None:
        name = type(module).__name__
        raise ModelError(f"{name} does not pass keyword arguments to its attention: not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = disagg.attend(module, query[0], key[0], value[0], scale, options)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, disagg_attention)
