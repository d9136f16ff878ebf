"""One layer of sequences over an arena: write a prompt, follow a step plan, read back.

The engine runs this for B sequences and L layers, `CompressedKV` for one of each: same code, same
bytes. Knows ids, layouts and kernels; who owns a page is the pool's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from disagg.codecs.contract import Codec, Encoded, Prompt, Queries, seed_of
from disagg.codecs.exact import exact_format, raw_blocks
from disagg.kernels.cpu.step import LayerCalls
from disagg.kernels.ops import append, attend, load_blocks, prepare, store_blocks
from disagg.kernels.reference.pages import exact_tokens
from disagg.kernels.reference.quantize import rounded
from disagg.kernels.sealing import NewRows, Sealing, Target
from disagg.kernels.view import Softmax, Table, View
from disagg.kv.page import FinalAt, Kind, Layout
from disagg.kv.plan import LayerGroup
from disagg.paged.append import RecordIds
from disagg.paged.page_tables import GroupStep, PageTable


@dataclass(frozen=True)
class Written:
    """Layer pages that are now final: these records of a kind."""

    kind: Kind
    indices: range


@dataclass(frozen=True)
class LayerRecords:
    """The records of a layer group in an arena: what they hold of one layer."""

    group: LayerGroup
    layer: int
    arena: Tensor

    def target(self, layout: Layout, pages: Tensor | Sequence[int]) -> Target:
        """Where the layer pages of some records lie."""
        ids = torch.as_tensor(pages, dtype=torch.int32, device=self.arena.device)
        return Target(self.arena, ids, self.group.layer_offset(layout, self.layer))

    def write(self, layout: Layout, pages: Tensor, blocks: Tensor) -> None:
        """Fill records with blocks [P, H, block_bytes] u8."""
        store_blocks(self.target(layout, pages), blocks)

    def read(self, layout: Layout, pages: Tensor | Sequence[int]) -> Tensor:
        """The blocks of some records: [P, H, block_bytes] u8."""
        there = self.target(layout, pages)
        heads, nbytes = self.group.heads, layout.block_bytes
        return load_blocks(self.arena, there.pages, there.base, heads, nbytes)

    def read_tail(self, pages: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
        """The exact tokens of raw pages of a tail: k, v [H, n, D] in the raw dtype."""
        raw = self.group.raw
        return exact_tokens(self.read(raw, pages), exact_format(raw))

    def write_kept(self, at: RecordIds, encoded: Encoded) -> None:
        """Fill the side record, and the raw pages that it names."""
        if encoded.side is not None and self.group.side is not None:
            self.write(self.group.side, at.side, encoded.side.unsqueeze(0))
        if encoded.kept is not None and len(at.kept):
            self.write(self.group.raw, at.kept, encoded.kept)

    def read_kept(self, at: RecordIds) -> tuple[Tensor | None, Tensor | None]:
        """The side record [H, bytes] u8, and the raw pages of kept tokens, where there are any."""
        side = (
            None if self.group.side is None else self.read(self.group.side, at.side)[0]
        )
        return side, self.read(self.group.raw, at.kept) if len(at.kept) else None


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
    codec: Codec,
    group: LayerGroup,
    at: RecordIds,
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
    """Encode what a chunk of prefill made final, into the records of a sequence.

    at:      those records, on the device of the arena: so nothing is copied to it here
    k, v:    [H, n, D] - exact K and V of all tokens so far from the `first` on, after RoPE; that is
             0 where the group wants all of them
    before:  tokens that earlier calls for this layer had seen
    total:   tokens of the whole prompt; at done == total the raw pages are written too
    queries: of the tokens so far, for codecs that choose by them
    there:   leading pages that whoever gets the records has already: they are left out
    """
    done, sink, raw = first + k.shape[1], group.sink, exact_format(group.raw)
    prompt, records = Prompt(total, k, queries), LayerRecords(group, layer, arena)
    written: list[Written] = []
    dropped, end = group.dropped(total), encodable(group, done, total)
    start = max(dropped + there * group.page.tokens, encodable(group, before, total))
    if end > start:
        some = slice(sink + start - first, sink + end - first)
        page, count = (
            (start - dropped) // group.page.tokens,
            (end - start) // group.page.tokens,
        )
        pages = at.pages[page : page + count].clone()  # on 16 bytes, as kernels want it
        target = records.target(group.page, pages)
        new_k, new_v = (rounded(x[:, some], raw) for x in (k, v))
        encoded = codec.encode(new_k, new_v, sink + start, layer, prompt, target)
        if encoded.segments is not None and group.segment is not None:
            index = (start - dropped) // group.segment_tokens
            chosen = at.segments[index : index + encoded.segments.shape[0]]
            records.write(group.segment, chosen, encoded.segments)
            written.append(Written(Kind.SEGMENT, range(index, index + len(chosen))))
        written.append(Written(Kind.PAGE, range(page, page + count)))
        records.write_kept(at, encoded)
    if done == total:
        if group.is_side_sent(total):
            written.append(Written(Kind.SIDE, range(1)))
        if not end and group.side is not None:
            early = Encoded(k.new_zeros(0), side=codec.early_side(prompt))
            records.write_kept(at, early)
        if len(at.tail):
            ends = [
                torch.cat([x[:, :sink], x[:, sink + end - first :]], 1) for x in (k, v)
            ]
            records.write(
                group.raw, at.tail, raw_blocks(*(rounded(x, raw) for x in ends))
            )
        if raws := len(at.tail) + len(at.kept):
            written.append(Written(Kind.RAW, range(raws)))
    return written


def write_step(
    codec: Codec, step: GroupStep, layer: int, arena: Tensor, k: Tensor, v: Tensor
) -> None:
    """Append the step's new tokens of one layer to the tails, and seal what is full.

    k, v: [N, H, D] - one row for each row of `step.rows`
    """
    group = step.group
    sealing = _sealing(codec, step, layer)
    append(arena, k, v, _new_rows(step, layer), sealing)
    for seal in step.seals if sealing is None else ():
        at, records, segments = seal.places, LayerRecords(group, layer, arena), None
        if group.segment is not None and len(at.segments) and not seal.fresh:
            segments = records.read(group.segment, at.segments)
        before = Encoded(arena.new_zeros(0), segments, *records.read_kept(at))
        encoded = codec.flush(*records.read_tail(at.tail), seal.first, layer, before)
        records.write(group.decode_page, at.pages, encoded.blocks)
        if seal.fresh and encoded.segments is not None:
            records.write(group.layout(Kind.SEGMENT), at.segments, encoded.segments)
        records.write_kept(at, encoded)


class StepLayers:
    """A step of one layer group, layer by layer: new tokens are written, then attended from.

    Where the C library serves all of it, a layer is one call of it; what they share is made once.
    """

    def __init__(self, codec: Codec, step: GroupStep, arena: Tensor) -> None:
        self.step = step
        self._codec, self._arena = codec, arena
        self._calls: LayerCalls | None = None
        self._alone = step.queries.shape[1] == 1 and not arena.is_cuda

    def run(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> Tensor:
        """q [Hq, N, D], k and v [H, N, D] of the step's rows -> [N, Hq, D] of q's dtype."""
        codec, step, arena = self._codec, self.step, self._arena
        new_q = q.transpose(0, 1)
        if self._alone and self._calls is None:
            first = step.group.layers[0]
            views = views_of(step.group, first, arena, step.tables)
            self._calls = prepare(
                arena, _new_rows(step, first), views, new_q.unsqueeze(1)
            )
            self._alone = self._calls is not None
        written = self._calls is None or bool(step.seals) or step.completed is not None
        if written:
            write_step(codec, step, layer, arena, k.transpose(0, 1), v.transpose(0, 1))
        if self._calls is None:
            return attend_step(step, layer, arena, new_q, softmax)
        return self._calls.run(step.group.rank(layer), q, k, v, written, softmax)


def attend_step(
    step: GroupStep, layer: int, arena: Tensor, q: Tensor, softmax: Softmax
) -> Tensor:
    """Attention of the step's new tokens over everything they see: [N, Hq, D] of q's dtype.

    q: [N, Hq, D] - one row for each row of `step.rows`
    """
    alone = step.queries.shape[1] == 1  # then the queries of the sequences are the rows
    rows = q.unsqueeze(1) if alone else q[step.queries]
    views = views_of(step.group, layer, arena, step.tables)
    o = attend(rows, views, softmax, step.units)
    return o[:, 0] if alone else o.flatten(0, 1)[step.answers]


def views_of(
    group: LayerGroup, layer: int, arena: Tensor, tables: Sequence[PageTable]
) -> list[View]:
    """What attention over all tables reads, over disjoint tokens."""
    views = []
    for table in tables:
        segment = None if table.segments is None else group.segment_of(table.layout)
        side = None if table.sides is None else group.side
        view = View(
            **{x.name: getattr(table, x.name) for x in fields(Table)},
            arena=arena,
            base=group.layer_offset(table.layout, layer),
            heads=group.heads,
            segment_base=group.layer_offset(segment, layer) if segment else 0,
            side_base=group.layer_offset(side, layer) if side else 0,
        )
        views.append(view)
    return views


def _new_rows(step: GroupStep, layer: int) -> NewRows:
    """Where a layer's new tokens go."""
    raw = step.group.raw
    return NewRows(
        step.pages, step.slots, exact_format(raw), step.group.layer_offset(raw, layer)
    )


def _sealing(codec: Codec, step: GroupStep, layer: int) -> Sealing | None:
    """How the append of a layer seals what its rows complete; None: it does not."""
    group, rows = step.group, step.completed
    fmt = None if rows is None else codec.seal_format(group.head_dim)
    if rows is None or fmt is None or any(seal.fresh for seal in step.seals):
        return None
    page = group.decode_page
    segment = group.segment_of(page)
    offset = group.layer_offset(segment, layer) if segment else 0
    return Sealing(
        rows, fmt, group.layer_offset(page, layer), offset, seed_of(layer, 0)
    )
