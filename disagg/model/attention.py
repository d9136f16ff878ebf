"""The attention function that models call: exact for prompts, on compressed pages for new tokens.

A forward pass has one packed row of tokens. Its `Batch`, a keyword argument of the model, says
which of them are chunks of prompts and which decode:

    rows       │ chunk of prompt A │ chunk of prompt B │ c │ d │ e e e e │
    attention    exact, own prompt   exact, own prompt   pages and tail of c, d, e (e: replay)

Registered with transformers as "disagg"; it has no mask function there, so models build no mask.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from disagg.codecs.contract import Codec
from disagg.errors import ModelError
from disagg.kernels.cpu import exact as cpu_exact
from disagg.kernels.reference.softmax import capped
from disagg.kernels.view import Softmax
from disagg.kv.plan import LayerShape
from disagg.model.cache import Workspace
from disagg.model.latents import heads_of
from disagg.model.states.step import NO_STATES, StateStep
from disagg.paged.layer import StepLayers
from disagg.paged.page_tables import GroupStep

IMPLEMENTATION = "disagg"
BLOCK_SCORES = 1 << 24  # fp32 scores in memory at a time, where no fused kernel serves
PIECE = 64  # tokens of a prompt whose queries are attended together, on a CPU
ROWS = 16  # of them at least: products of fewer rows round otherwise
HALVES = (torch.float16, torch.bfloat16)
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# called with a layer; k and v [H, n, D], the exact K and V of the last n tokens so far (all tokens,
# except where a window hides the first); and the chunk, whose tables are on the device
OnLayer = Callable[[int, Tensor, Tensor, "Chunk"], None]

# answers an attention call of a model. Called with the module; q [Hq, N, D], k and v [H, N, D] of a
# packed row of N tokens; the softmax; and the other arguments of the call. Returns [N, Hq, D].
# Of latents, k is the latents and rotated keys, v a part of them: see latents.py
Attention = Callable[[nn.Module, Tensor, Tensor, Tensor, Softmax, dict], Tensor]

Size = tuple[int, int]  # tokens of a step's page tables, and its units of work on a GPU


@dataclass(frozen=True)
class Chunk:
    """Rows `row` .. `row + count - 1`: tokens `before` .. of one prompt.

    on_layer: called with the exact K and V so far, as soon as a layer has attended
    tables:   a tree of int32 tensors for `on_layer`, copied to the device with those of the step
    """

    row: int
    count: int
    before: int
    workspace: Workspace
    on_layer: OnLayer
    tables: Any = ()


@dataclass(frozen=True)
class Decode:
    """The decoding rows of one layer group in a step, and the codec of its pages.

    whole: the rows of the step are all rows of the batch, in order: none need be selected
    """

    codec: Codec
    step: GroupStep
    whole: bool = False


@dataclass(frozen=True)
class PartSizes:
    """How a part of a step runs under a recording (graphs.py); the same on all ranks of a group.

    size: of the recorded step that serves it; None: it has none, and the batch runs without
    new:  sizes that are recorded before
    """

    size: Size | None
    new: tuple[Size, ...] = ()


@dataclass(frozen=True)
class Batch:
    """One forward pass over a packed row of tokens.

    tokens, positions: one per row
    outputs: rows whose logits are returned
    arena:   [bytes] u8 - the memory that holds the pages of `decodes`
    states:  the same rows as layers with a state see them; empty where there are no such layers
    long_rows: which rows belong to texts with the long factors of LongRoPE; empty: by position
    recordings: of its parts, as the first rank has chosen; None: the runner chooses
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    outputs: Sequence[int]
    arena: Tensor
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    states: StateStep = NO_STATES
    long_rows: Sequence[bool] = ()
    recordings: tuple[PartSizes, ...] | None = None

    def with_rows(self, least: int) -> "Batch":
        """This batch with at least so many rows; those behind it belong to no sequence.

        Not for batches with states, whose tables know each row.
        """
        missing = least - len(self.tokens)
        if missing <= 0:
            return self
        return replace(
            self,
            tokens=[*self.tokens, *[0] * missing],
            positions=[*self.positions, *[0] * missing],
            long_rows=[*self.long_rows, *[False] * missing],
        )

    @cached_property
    def by_layer(self) -> dict[int, list[tuple[Decode, StepLayers]]]:
        """The decodes of each layer."""
        decodes: dict[int, list[tuple[Decode, StepLayers]]] = {}
        for decode in self.decodes:
            layers = StepLayers(decode.codec, decode.step, self.arena)
            for layer in decode.step.group.layers:
                decodes.setdefault(layer, []).append((decode, layers))
        return decodes


@dataclass(frozen=True)
class BatchAttention:
    """Answers every attention call of one forward pass, layer by layer.

    shapes:  of the layers with K and V
    sources: of each call, the layer whose K and V it attends to; the first one brings them
    calls:   those to come; not every module of a hybrid model knows its own
    exact:   K and V so far of chunks, by chunk and layer, for calls that bring none
    """

    batch: Batch
    shapes: Sequence[LayerShape]
    sources: Sequence[int]
    calls: Iterator[int] = field(default_factory=count)
    exact: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: Softmax,
        options: dict,
    ) -> Tensor:
        call = next(self.calls)
        layer = self.sources[call]
        is_new = layer not in self.sources[:call]
        heads = heads_of(module)
        decodes = self.batch.by_layer.get(layer, [])
        if len(decodes) == 1 and decodes[0][0].whole:
            attended = decodes[0][1].run(layer, heads.ask(q), k, v, softmax, is_new)
            return heads.answer(attended)
        channels = heads.value_dim or v.shape[2]
        out = q.new_zeros(q.shape[1], q.shape[0], channels)
        for index, chunk in enumerate(self.batch.chunks):
            rows = slice(chunk.row, chunk.row + chunk.count)
            if is_new:
                new_k, new_v = k[:, rows], v[:, rows]
                exact = chunk.workspace.extend(layer, new_k, new_v, chunk.before)
            else:
                exact = self.exact[index, layer]
            if layer in self.sources[call + 1 :]:
                self.exact[index, layer] = exact
            chunk_q = q[:, rows]
            end = chunk.before + chunk.count
            shape = self.shapes[layer]
            all_k, all_v = heads.expand(*exact)
            attended = attend_visible(chunk_q, all_k, all_v, softmax, shape, end)
            if chunk.count == len(out):
                out = attended.transpose(0, 1)
            else:
                out[rows] = attended.transpose(0, 1)
            if is_new:
                asked = heads.ask(chunk_q)
                chunk.workspace.observe(layer, asked, chunk.before, softmax)
                chunk.on_layer(layer, *exact, chunk)
        for decode, step_layers in decodes:
            row_ids = decode.step.rows
            asked = heads.ask(q[:, row_ids])
            attended = step_layers.run(
                layer, asked, k[:, row_ids], v[:, row_ids], softmax, is_new
            )
            out.index_add_(0, row_ids, heads.answer(attended))
        return out


def attend_visible(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, shape: LayerShape, end: int
) -> Tensor:
    """Attention of the last c of n tokens, as the window of a layer lets them see.

    q [Hq, c, D], k and v [H, n, D] -> [Hq, c, D]
    end: the position behind the last token
    """
    size = shape.window
    if size is None or not shape.chunked:
        return attend_exact(q, k, v, softmax, size)
    first = end - k.shape[1]
    before = end - q.shape[1]
    outputs = []
    for start in range(before - before % size, end, size):
        query = slice(max(start, before) - before, start + size - before)
        visible = slice(max(start - first, 0), start + size - first)
        part = attend_exact(q[:, query], k[:, visible], v[:, visible], softmax, None)
        outputs.append(part)
    return torch.cat(outputs, 1)


def attend_exact(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None
) -> Tensor:
    """Causal attention of the last c of n tokens: q [Hq, c, D], k and v [H, n, D] -> [Hq, c, D].

    V, and with it the output, may have fewer channels than K.

    window: tokens a query sees, itself included; None: all of them
    """
    channels = v.shape[2]
    missing = k.shape[2] - channels
    if missing:  # fused kernels want equal ones
        padded_v = pad(v, (0, missing))
        return attend_exact(q, k, padded_v, softmax, window)[..., :channels]
    count = q.shape[1]
    if window is not None:
        visible = count + window - 1
        k = k[:, -visible:]
        v = v[:, -visible:]
    total = k.shape[1]
    if softmax.cap or softmax.sinks is not None:
        return _attend_in_blocks(q, k, v, softmax, window or total)
    if window is not None and window < total:
        return _attend_with_mask(q, k, v, softmax, window)
    if cpu_exact.is_served(q, k, v):
        return cpu_exact.attend_exact(q, k, v, softmax.scale)
    if q.device.type == "cpu":
        return _attend_in_pieces(q, k, v, softmax)
    if count in (1, total):
        return _attend_fused(q, k, v, softmax, None)
    flash = SDPAParams(q[None], k[None], v[None], None, 0, False, True)
    if can_use_flash_attention(flash):
        # no mask in memory: a flag of the kernel
        return _attend_fused(q, k, v, softmax, causal_lower_right(count, total))
    return _attend_with_mask(q, k, v, softmax, total)


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, mask: Tensor | None
) -> Tensor:
    """By torch; without a mask, causal attention of one token or of all tokens."""
    out = scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None and q.shape[1] > 1,
        scale=softmax.scale,
        enable_gqa=q.shape[0] != k.shape[0],
    )
    return out[0]


def _attend_with_mask(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int
) -> Tensor:
    """By torch, with a mask of the last `window` tokens of each query."""
    count, total = q.shape[1], k.shape[1]
    key = torch.arange(total, device=q.device)
    query = key[total - count :, None]
    mask = key <= query
    if window < total:
        mask &= key > query - window
    # with a mask, grouped heads fall back to slow kernels
    repeats = q.shape[0] // k.shape[0]
    k = k.repeat_interleave(repeats, 0)
    v = v.repeat_interleave(repeats, 0)
    return _attend_fused(q, k, v, softmax, mask)


def _attend_in_pieces(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Causal attention on a CPU, whose bits do not depend on where the chunk begins and ends.

    A last bit can decide between two codes of a page, and later between two tokens. So queries go
    in pieces that begin at multiples of PIECE tokens, padded to full length. Each piece attends to
    itself and to the tokens before it; the two are merged. The kernel is the one below
    `scaled_dot_product_attention`, which returns no log-sum-exps. In 16 bits it decides by the
    numbers of queries, heads and threads whether it packs K and V, and then sums in another order:
    there all calls for a piece have the same sizes.
    """
    total = k.shape[1]
    before = total - q.shape[1]
    start = before - before % PIECE
    behind = -total % PIECE
    all_q = pad(q, (0, 0, before - start, behind))
    own_kv = [pad(x[:, start:], (0, 0, 0, behind)) for x in (k, v)]
    pieces = [x.unflatten(1, (-1, PIECE)).transpose(0, 1) for x in (all_q, *own_kv)]
    own, own_lse = _attend_own(pieces, softmax)
    outputs = []
    for index, piece in enumerate(pieces[0]):
        end = start + index * PIECE
        output = own[index]
        if end:
            first = max(0, before - end)
            past, past_lse = _attend_past(
                piece, k[:, :end], v[:, :end], softmax, first, total - end
            )
            past_weight = torch.sigmoid(past_lse - own_lse[index])[..., None]
            output = torch.lerp(output.float(), past.float(), past_weight).to(q.dtype)
        outputs.append(output)
    return torch.cat(outputs, 1)[:, before - start : total - start]


def _attend_own(pieces: Sequence[Tensor], softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Causal attention of pieces to themselves, and log-sum-exps.

    pieces: q [P, Hq, PIECE, D], k and v [P, H, PIECE, D]
    """
    at_once = 1 if pieces[0].dtype in HALVES else len(pieces[0])
    calls = zip(*(x.split(at_once) for x in pieces), strict=True)
    parts = [FLASH(*call, is_causal=True, scale=softmax.scale) for call in calls]
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def _attend_past(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Attention of a piece to the tokens before it, and log-sum-exps; zeros for rows that pad it.

    first, last: the rows that are tokens. In fp32 a multiple of ROWS gives the same bits as all
    """
    if q.dtype in HALVES:
        first, last = 0, PIECE
    else:
        first -= first % ROWS
        last = min(PIECE, last + -last % ROWS)
    # the queries of one KV head side by side: so many rows are faster
    grouped_q = q[:, first:last].unflatten(0, (k.shape[0], -1)).flatten(1, 2)
    out, lse = FLASH(
        grouped_q[None], k[None], v[None], is_causal=False, scale=softmax.scale
    )
    shape = q.shape[0], last - first
    rows = (first, PIECE - last)
    out = pad(out.reshape(*shape, -1), (0, 0, *rows))
    return out, pad(lse.reshape(shape), rows)


def _attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int
) -> Tensor:
    """Causal attention under caps and with sinks, which torch has no fused kernel for.

    A block of queries at a time, so that the scores fit into memory.
    """
    count, total = q.shape[1], k.shape[1]
    before = total - count
    most_keys = min(total, 2 * window)  # of a block of at most `window` queries
    block = max(1, min(window, BLOCK_SCORES // (q.shape[0] * most_keys)))
    outputs = []
    for first in range(0, count, block):
        block_q = q[:, first : first + block]
        end = before + first + block_q.shape[1]
        start = max(0, before + first + 1 - window)
        block_k = k[:, start:end]
        block_v = v[:, start:end]
        # the queries of one KV head side by side
        grouped_q = block_q.unflatten(0, (k.shape[0], -1)).flatten(1, 2)
        products = (grouped_q @ block_k.transpose(1, 2)).float() * softmax.scale
        scores = capped(products.view(q.shape[0], -1, end - start), softmax.cap)
        query = torch.arange(before + first, end, device=q.device)[:, None]
        key = torch.arange(start, end, device=q.device)
        scores.masked_fill_((key > query) | (key <= query - window), -torch.inf)
        lse = scores.logsumexp(2)
        if softmax.sinks is not None:
            lse = torch.logaddexp(lse, softmax.sinks.float()[:, None])
        p = (scores - lse[:, :, None]).exp().to(v.dtype)
        out = p.view(*grouped_q.shape[:2], -1) @ block_v
        outputs.append(out.view_as(block_q))
    return torch.cat(outputs, 1)


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
    """The function that transformers calls in every layer: query [1, Hq, N, D] -> [1, N, Hq, D].

    softcap, s_aux: its names of the cap of scores, and of sinks
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
