"""One layer of sequences over an arena: write a prompt, follow a step plan, read back.

The engine runs this for B sequences and L layers, `CompressedKV` for one of each: same code, same
bytes. Knows ids, layouts and kernels; who owns a page is the pool's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.codecs.contract import Encoded, LayerCodec, Prompt, Queries, seed_of
from disagg.codecs.exact import exact_format, raw_blocks
from disagg.codecs.seals import Seal, flush_layout, segment_layout
from disagg.codecs.tables import GroupStep, PageTable
from disagg.kernels.cpu.step import LayerCalls
from disagg.kernels.ops import (
    append,
    attend,
    gather_raw,
    load_blocks,
    prepare,
    rounded,
    store_blocks,
)
from disagg.kernels.sealing import NewRows, Sealing, Target
from disagg.kernels.view import Softmax, View
from disagg.page import FinalAt, Kind, Layout
from disagg.plan import LayerGroup
from disagg.state import GroupState


@dataclass(frozen=True)
class Written:
    """Layer pages that are now final: these records of a kind."""

    kind: Kind
    indices: range


def encodable(group: LayerGroup, done: int, total: int) -> int:
    """How many tokens of pages can be encoded for good when `done` of `total` are computed.

    Depends on nothing else, so bytes never depend on how the prompt was cut into chunks.
    """
    sealed = group.sealed(total)
    if done >= total or group.final_at is FinalAt.PROMPT or done < group.lead:
        return sealed if done >= total else 0
    step = group.page.tokens if group.final_at is FinalAt.PAGE else group.segment_tokens
    return min(sealed, step * (max(0, done - group.sink) // step))


def write_prompt(
    codec: LayerCodec,
    group: LayerGroup,
    state: GroupState,
    layer: int,
    arena: Tensor,
    k: Tensor,
    v: Tensor,
    before: int,
    total: int,
    queries: Queries | None = None,
    first: int = 0,
    there: int = 0,
) -> list[Written]:
    """Encode what a chunk of prefill made final, into the records of `state`.

    k, v:    [H, n, D] - exact K and V of all tokens so far from the `first` on, after RoPE; that is
             0 where the group wants all of them
    before:  tokens that earlier calls for this layer had seen
    total:   tokens of the whole prompt; at done == total the raw pages are written too
    queries: of the tokens so far, for codecs that choose by them
    there:   leading pages that whoever gets the records has already: they are left out
    """
    done, sink, raw = first + k.shape[1], group.sink, exact_format(group.raw)
    prompt = Prompt(total, k, queries)
    written: list[Written] = []
    dropped, end = group.dropped(total), encodable(group, done, total)
    start = max(dropped + there * group.page.tokens, encodable(group, before, total))
    if end > start:
        some = slice(sink + start - first, sink + end - first)
        page, count = (start - dropped) // group.page.tokens, (end - start) // group.page.tokens
        pages = state.page_ids()[page : page + count]
        target = _target(group, group.page, layer, arena, pages)
        new_k, new_v = (rounded(x[:, some], raw) for x in (k, v))
        encoded = codec.encode(new_k, new_v, sink + start, layer, prompt, target)
        if encoded.segments is not None and group.segment is not None:
            index = (start - dropped) // group.segment_tokens
            ids = list(dict.fromkeys(run.segment for run in state.runs if run.segment is not None))
            chosen = ids[index : index + encoded.segments.shape[0]]
            _store(group, group.segment, layer, arena, encoded.segments, chosen)
            written.append(Written(Kind.SEGMENT, range(index, index + len(chosen))))
        written.append(Written(Kind.PAGE, range(page, page + count)))
        _store_kept(group, layer, arena, encoded, state)
    if done == total:
        if group.is_side_sent(total):
            written.append(Written(Kind.SIDE, range(1)))
        if not end and group.side is not None:
            early = Encoded(k.new_zeros(0), side=codec.early_side(prompt))
            _store_kept(group, layer, arena, early, state)
        if state.tail:
            ends = [torch.cat([x[:, :sink], x[:, sink + end - first :]], 1) for x in (k, v)]
            blocks = raw_blocks(*(rounded(x, raw) for x in ends))
            _store(group, group.raw, layer, arena, blocks, state.tail)
        if raws := len(state.tail) + len(state.kept):
            written.append(Written(Kind.RAW, range(raws)))
    return written


def write_step(
    codec: LayerCodec, step: GroupStep, layer: int, arena: Tensor, k: Tensor, v: Tensor
) -> None:
    """Append the step's new tokens of one layer to the tails, and seal what is full.

    k, v: [N, H, D] - one row for each row of `step.rows`
    """
    group = step.group
    sealing = _sealing(codec, step, layer)
    append(arena, k, v, _new_rows(step, layer), sealing)
    for seal in step.seals if sealing is None else ():
        tail = read_tail(group, seal.tail, layer, arena)
        encoded = codec.flush(*tail, seal.first, layer, _before(group, seal, layer, arena))
        _store(group, flush_layout(group), layer, arena, encoded.blocks, [seal.page])
        if seal.fresh and encoded.segments is not None and seal.segment is not None:
            layout = group.layout(Kind.SEGMENT)
            _store(group, layout, layer, arena, encoded.segments, [seal.segment])
        _store_kept(group, layer, arena, encoded, seal.state)


class StepLayers:
    """A step of one layer group, layer by layer: new tokens are written, then attended from.

    Where the C library serves all of it, a layer is one call of it; what they share is made once.
    """

    def __init__(self, codec: LayerCodec, step: GroupStep, arena: Tensor) -> None:
        self.step = step
        self._codec, self._arena = codec, arena
        self._calls: LayerCalls | None = None
        self._alone = step.queries.shape[1] == 1 and not arena.is_cuda

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """q [Hq, N, D], k and v [H, N, D] of the step's rows -> [N, Hq, D] of q's dtype."""
        codec, step, arena = self._codec, self.step, self._arena
        new_q, new_k, new_v = (x.transpose(0, 1) for x in (q, k, v))
        if self._alone and self._calls is None:
            first = step.group.layers[0]
            views = views_of(codec, step.group, first, arena, step.tables)
            self._calls = prepare(arena, _new_rows(step, first), views, new_q.float().unsqueeze(1))
            self._alone = self._calls is not None
        written = self._calls is None or bool(step.seals) or step.completed is not None
        if written:
            write_step(codec, step, layer, arena, new_k, new_v)
        if self._calls is None:
            return attend_step(codec, step, layer, arena, new_q, softmax)
        return self._calls.run(step.group.rank(layer), q, k, v, written, softmax)


def attend_step(
    codec: LayerCodec, step: GroupStep, layer: int, arena: Tensor, q: Tensor, softmax: Softmax
) -> Tensor:
    """Attention of the step's new tokens over everything they see: [N, Hq, D] of q's dtype.

    q: [N, Hq, D] - one row for each row of `step.rows`
    """
    alone = step.queries.shape[1] == 1  # then the queries of the sequences are the rows
    rows = q.unsqueeze(1) if alone else q[step.queries]
    views = views_of(codec, step.group, layer, arena, step.tables)
    o = attend(rows, views, softmax, step.units)
    return o[:, 0] if alone else o.flatten(0, 1)[step.answers]


def views_of(
    codec: LayerCodec, group: LayerGroup, layer: int, arena: Tensor, tables: Sequence[PageTable]
) -> list[View]:
    """What attention over all tables reads, over disjoint tokens."""
    views: list[View] = []
    for table in tables:
        if table.layout == group.raw:
            fmt = exact_format(group.raw, group.side if table.sides is not None else None)
            views.append(table.view(arena, group, layer, fmt))
        else:
            views += codec.views(arena, table, group, layer)
    return views


def _new_rows(step: GroupStep, layer: int) -> NewRows:
    """Where a layer's new tokens go."""
    raw = step.group.raw
    return NewRows(step.pages, step.slots, exact_format(raw), step.group.layer_offset(raw, layer))


def read_tail(
    group: LayerGroup, pages: Sequence[int], layer: int, arena: Tensor
) -> tuple[Tensor, Tensor]:
    """The exact tokens of raw pages of a tail: k, v [H, n, D] in the raw dtype."""
    ids = torch.tensor([pages], dtype=torch.int32, device=arena.device)
    base = group.layer_offset(group.raw, layer)
    k, v = gather_raw(arena, ids, exact_format(group.raw), base, group.heads)
    return k[0], v[0]


def read_blocks(
    group: LayerGroup, layout: Layout, layer: int, arena: Tensor, pages: list[int]
) -> Tensor:
    """The layer pages of some records: [P, H, block_bytes] u8."""
    ids = torch.tensor(pages, dtype=torch.int32, device=arena.device)
    base = group.layer_offset(layout, layer)
    return load_blocks(arena, ids, base, group.heads, layout.block_bytes)


def read_kept(
    group: LayerGroup, state: GroupState, layer: int, arena: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The side record [H, bytes] u8, and the raw pages of kept tokens, where there are any."""
    side = kept = None
    if group.side is not None and state.side is not None:
        side = read_blocks(group, group.side, layer, arena, [state.side])[0]
    if state.kept:
        kept = read_blocks(group, group.raw, layer, arena, state.kept)
    return side, kept


def _sealing(codec: LayerCodec, step: GroupStep, layer: int) -> Sealing | None:
    """How the append of a layer seals what its rows complete; None: it does not."""
    group, rows = step.group, step.completed
    fmt = None if rows is None else codec.seal_format(group.head_dim)
    if rows is None or fmt is None or any(seal.fresh for seal in step.seals):
        return None
    page = flush_layout(group)
    segment = segment_layout(group, page)
    offset = group.layer_offset(segment, layer) if segment else 0
    return Sealing(rows, fmt, group.layer_offset(page, layer), offset, seed_of(layer, 0))


def _before(group: LayerGroup, seal: Seal, layer: int, arena: Tensor) -> Encoded:
    """What a flush may look at: the segment that its page joins, the side record, kept tokens."""
    segments = None
    if group.segment is not None and seal.segment is not None and not seal.fresh:
        segments = read_blocks(group, group.segment, layer, arena, [seal.segment])
    return Encoded(arena.new_zeros(0), segments, *read_kept(group, seal.state, layer, arena))


def _store_kept(
    group: LayerGroup, layer: int, arena: Tensor, encoded: Encoded, state: GroupState
) -> None:
    """The side record and the raw pages that it names."""
    if encoded.side is not None and group.side is not None and state.side is not None:
        _store(group, group.side, layer, arena, encoded.side.unsqueeze(0), [state.side])
    if encoded.kept is not None and state.kept:
        _store(group, group.raw, layer, arena, encoded.kept, state.kept)


def _store(
    group: LayerGroup, layout: Layout, layer: int, arena: Tensor, blocks: Tensor, pages: list[int]
) -> None:
    store_blocks(_target(group, layout, layer, arena, pages), blocks)


def _target(
    group: LayerGroup, layout: Layout, layer: int, arena: Tensor, pages: list[int]
) -> Target:
    """Where the layer pages of some records lie."""
    ids = torch.tensor(pages, dtype=torch.int32, device=arena.device)
    return Target(arena, ids, group.layer_offset(layout, layer))
