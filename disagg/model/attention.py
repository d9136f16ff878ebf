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
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from disagg.codecs.contract import Codec
from disagg.errors import ModelError
from disagg.kernels.reference.softmax import capped
from disagg.kernels.view import Softmax
from disagg.model.cache import Workspace
from disagg.paged.layer import StepLayers
from disagg.paged.page_tables import GroupStep

IMPLEMENTATION = "disagg"
BLOCK_SCORES = (
    1 << 24
)  # fp32 scores that are held at a time where no fused kernel serves

# layer, k [H, n, D], v [H, n, D]: exact K and V of the last n tokens so far, all but where windows
# hide the first; the chunk, whose tables are on the device
Sink = Callable[[int, Tensor, Tensor, "Chunk"], None]

# what answers an attention call of a model: its module; q [Hq, N, D], k and v [H, N, D] of a packed
# row of N tokens; how it wants their softmax; all that it says besides -> [N, Hq, D]
Attention = Callable[[nn.Module, Tensor, Tensor, Tensor, Softmax, dict], Tensor]


@dataclass(frozen=True)
class Chunk:
    """Rows `row` .. `row + count - 1`: tokens `before` .. of one prompt.

    sink:   called with the exact K and V so far, as soon as a layer has attended
    tables: a tree of int32 tensors that the sink wants, copied with those of the step
    """

    row: int
    count: int
    before: int
    workspace: Workspace
    sink: Sink
    tables: Any = ()


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
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: Softmax,
        options: dict,
    ) -> Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        decodes = self.batch.by_layer.get(layer, [])
        if len(decodes) == 1 and decodes[0][0].whole:
            return decodes[0][1].run(layer, q, k, v, softmax)
        out = q.new_zeros(q.shape[1], q.shape[0], q.shape[2])
        for chunk in self.batch.chunks:
            rows = slice(chunk.row, chunk.row + chunk.count)
            exact = chunk.workspace.extend(layer, k[:, rows], v[:, rows], chunk.before)
            window = self.windows[layer]
            out[rows] = attend_exact(q[:, rows], *exact, softmax, window).transpose(
                0, 1
            )
            chunk.workspace.observe(layer, q[:, rows], chunk.before, softmax)
            chunk.sink(layer, *exact, chunk)
        for decode, layers in decodes:
            picked = decode.step.rows
            some_q, some_k, some_v = (x[:, picked] for x in (q, k, v))
            attended = layers.run(layer, some_q, some_k, some_v, softmax)
            out.index_add_(0, picked, attended)
        return out


def attend_exact(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None
) -> Tensor:
    """Causal attention of the last c of n tokens: q [Hq, c, D], k and v [H, n, D] -> [Hq, c, D].

    window: tokens a query sees, itself included; None: all of them
    """
    count = q.shape[1]
    if window is not None:
        k, v = (x[:, -(count + window - 1) :] for x in (k, v))
    total = k.shape[1]
    if softmax.cap or softmax.sinks is not None:
        return _attend_in_blocks(q, k, v, softmax, window or total)
    whole = window is None or window >= total
    if count in (1, total) and whole:
        mask: Tensor | None = None
    elif whole and q.device.type == "cpu":
        return _attend_in_two(q, k, v, softmax)
    elif whole and can_use_flash_attention(
        SDPAParams(q[None], k[None], v[None], None, 0, False, True)
    ):
        mask = causal_lower_right(
            count, total
        )  # no mask in memory: a flag of the kernel
    else:
        positions = torch.arange(total, device=q.device)
        query = positions[total - count :, None]
        mask = positions <= query
        if window is not None and not whole:
            mask &= positions > query - window
        repeats = (
            q.shape[0] // k.shape[0]
        )  # with a mask, grouped heads fall back to slow kernels
        k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    out = scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None and count > 1,
        scale=softmax.scale,
        enable_gqa=q.shape[0] != k.shape[0],
    )
    return out[0]


def _attend_in_two(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """The same on a CPU without a mask: tokens before the chunk, its own ones, then both joined.

    A mask is read for every score, and hides nothing but scores of the chunk's own tokens. The
    kernel is the one below `scaled_dot_product_attention`, which keeps the log-sum-exps to itself.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before = k.shape[1] - q.shape[1]
    (past, past_lse), (own, own_lse) = (
        flash(
            q[None],
            k[None, :, part],
            v[None, :, part],
            is_causal=causal,
            scale=softmax.scale,
        )
        for part, causal in ((slice(0, before), False), (slice(before, None), True))
    )
    share = torch.sigmoid(past_lse - own_lse)[..., None]
    return torch.lerp(own.float(), past.float(), share)[0].to(q.dtype)


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int
) -> Tensor:
    """The same under caps and with sinks, which torch fuses nowhere: some queries at a time."""
    before = k.shape[1] - q.shape[1]
    keys = min(
        k.shape[1], 2 * window
    )  # at most, of as many queries as a window has tokens
    rows = max(1, min(window, BLOCK_SCORES // (q.shape[0] * keys)))
    found = []
    for first in range(0, q.shape[1], rows):
        some_q = q[:, first : first + rows]
        end = before + first + some_q.shape[1]
        start = max(0, before + first + 1 - window)
        some_k, some_v = k[:, start:end], v[:, start:end]
        grouped = some_q.unflatten(0, (k.shape[0], -1)).flatten(
            1, 2
        )  # those of a KV head
        products = (grouped @ some_k.transpose(1, 2)).float() * softmax.scale
        scores = capped(products.view(q.shape[0], -1, end - start), softmax.cap)
        query = torch.arange(before + first, end, device=q.device)[:, None]
        key = torch.arange(start, end, device=q.device)
        scores.masked_fill_((key > query) | (key <= query - window), -torch.inf)
        lse = scores.logsumexp(2)
        if softmax.sinks is not None:
            lse = torch.logaddexp(lse, softmax.sinks.float()[:, None])
        p = (scores - lse[:, :, None]).exp().to(v.dtype)
        found.append((p.view(*grouped.shape[:2], -1) @ some_v).view_as(some_q))
    return torch.cat(found, 1)


def disagg_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    disagg: Attention | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: query [1, Hq, N, D] -> [1, N, Hq, D].

    softcap, s_aux: how it calls the cap of scores, and sinks
    """
    if disagg is None:
        name = type(module).__name__
        raise ModelError(
            f"{name} does not pass keyword arguments to its attention: not supported"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softmax = Softmax(scale, softcap or 0.0, s_aux)
    options["attention_mask"] = attention_mask
    out = disagg(module, query[0], key[0], value[0], softmax, options)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, disagg_attention)
