"""One layer of sequences over an arena: write a prompt, run a step, read pages back.

The engine runs this for B sequences and L layers, `CompressedKV` for one of each: the same code
writes the same bytes. It knows ids, layouts and kernels, but no owners of pages.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields

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
from disagg.paged.append import RecordIds, Seal
from disagg.paged.page_tables import GroupStep, PageTable


@dataclass(frozen=True)
class Written:
    """Layer pages that are now final: these records of a kind."""

    kind: Kind
    indices: range


@dataclass(frozen=True)
class LayerRecords:
    """One layer of the records of a layer group, in an arena."""

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
        target = self.target(layout, pages)
        return load_blocks(
            self.arena, target.pages, target.base, self.group.heads, layout.block_bytes
        )

    def read_tail(self, pages: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
        """The exact tokens of raw pages of a tail: k, v [H, n, D] in the raw dtype."""
        raw = self.group.raw
        return exact_tokens(self.read(raw, pages), exact_format(raw))

    def write_kept(self, at: RecordIds, encoded: Encoded) -> None:
        """Fill the side record, and the raw pages that it names."""
        if encoded.side is not None and self.group.side is not None:
            self.write(self.group.side, at.side, encoded.side.unsqueeze(0))
        if encoded.kept_pages is not None and len(at.kept_pages):
            self.write(self.group.raw, at.kept_pages, encoded.kept_pages)

    def read_kept(self, at: RecordIds) -> tuple[Tensor | None, Tensor | None]:
        """The side record [H, bytes] u8, and the raw pages of kept tokens, where there are any."""
        side = kept_pages = None
        if self.group.side is not None:
            side = self.read(self.group.side, at.side)[0]
        if len(at.kept_pages):
            kept_pages = self.read(self.group.raw, at.kept_pages)
        return side, kept_pages


@dataclass(frozen=True)
class PromptChunk:
    """Exact K and V of a prompt in one layer, after a chunk of prefill.

    k, v:       [H, n, D] - of all tokens so far from `first` on, after RoPE; where pages hold a
                latent, v is its channels of k: [H, n, latent]
    total:      tokens of the whole prompt
    before:     tokens that earlier calls for this layer had
    first:      position of the first token; 0 unless the group's `reach` lets older ones go
    queries:    of the tokens so far, for codecs that choose by them
    peer_pages: leading pages that the receiver of the records has already; they are not written
    """

    k: Tensor
    v: Tensor
    _: KW_ONLY
    total: int
    before: int = 0
    first: int = 0
    queries: Queries | None = None
    peer_pages: int = 0

    @property
    def done(self) -> int:
        """Tokens so far."""
        return self.first + self.k.shape[1]


def encodable(group: LayerGroup, done: int, total: int) -> int:
    """How many tokens of pages can be encoded for good when `done` of `total` are computed.

    Depends on nothing else, so bytes never depend on how the prompt was cut into chunks.
    """
    sealed = group.sealed(total)
    if done >= total:
        return sealed
    if group.final_at is FinalAt.PROMPT or done < group.lead:
        return 0
    step = group.page.tokens if group.final_at is FinalAt.PAGE else group.segment_tokens
    return min(sealed, step * (max(0, done - group.sink) // step))


def write_prompt(
    codec: Codec, records: LayerRecords, at: RecordIds, chunk: PromptChunk
) -> list[Written]:
    """Encode the tokens that a chunk of prefill made final, into the records of a sequence.

    Pages are written as soon as their bytes are final; the side record and the raw pages of sink
    and tail with the last chunk.

    at: ids of those records, on the device of the arena: so nothing is copied to it here
    """
    written = _write_pages(codec, records, at, chunk)
    if chunk.done == chunk.total:
        written += _write_ends(codec, records, at, chunk)
    return written


def _write_pages(
    codec: Codec, records: LayerRecords, at: RecordIds, chunk: PromptChunk
) -> list[Written]:
    """Encode the pages that became final, with their segments and kept tokens."""
    group, total = records.group, chunk.total
    dropped = group.dropped(total)
    begin = dropped + chunk.peer_pages * group.page.tokens
    start = max(begin, encodable(group, chunk.before, total))
    end = encodable(group, chunk.done, total)
    if end <= start:
        return []
    written = []
    page = (start - dropped) // group.page.tokens
    count = (end - start) // group.page.tokens
    pages = at.pages[page : page + count].clone()  # on 16 bytes, as kernels need
    position = group.sink + start
    tokens = slice(position - chunk.first, group.sink + end - chunk.first)
    raw = exact_format(group.raw)
    encoded = codec.encode(
        rounded(chunk.k[:, tokens], raw),
        rounded(chunk.v[:, tokens], raw),
        position,
        records.layer,
        Prompt(total, chunk.k, chunk.queries),
        records.target(group.page, pages),
        group.first_head,
    )
    if encoded.segments is not None and group.segment is not None:
        index = (start - dropped) // group.segment_tokens
        segments = at.segments[index : index + encoded.segments.shape[0]]
        records.write(group.segment, segments, encoded.segments)
        written.append(Written(Kind.SEGMENT, range(index, index + len(segments))))
    written.append(Written(Kind.PAGE, range(page, page + count)))
    records.write_kept(at, encoded)
    return written


def _write_ends(
    codec: Codec, records: LayerRecords, at: RecordIds, chunk: PromptChunk
) -> list[Written]:
    """Write the records of a whole prompt that are not pages: side record, sink and tail."""
    group = records.group
    sealed = group.sealed(chunk.total)
    written = []
    if group.is_side_sent(chunk.total):
        written.append(Written(Kind.SIDE, range(1)))
    if not sealed and group.side is not None:
        prompt = Prompt(chunk.total, chunk.k, chunk.queries)
        side = codec.early_side(prompt)
        records.write_kept(at, Encoded(chunk.k.new_zeros(0), side=side))
    if len(at.tail):
        raw = exact_format(group.raw)
        tail = group.sink + sealed - chunk.first
        k, v = (
            rounded(torch.cat([x[:, : group.sink], x[:, tail:]], 1), raw)
            for x in (chunk.k, chunk.v)
        )
        records.write(group.raw, at.tail, raw_blocks(k, v))
    num_raws = len(at.tail) + len(at.kept_pages)
    if num_raws:
        written.append(Written(Kind.RAW, range(num_raws)))
    return written


def write_step(
    codec: Codec, step: GroupStep, layer: int, arena: Tensor, k: Tensor, v: Tensor
) -> None:
    """Append the step's new tokens of one layer to the tails, and seal the full ones.

    k, v: [N, H, D] - one row for each row of `step.rows`; of latents, v is their channels of k
    """
    sealing = _sealing(codec, step, layer)
    stored_v = v if step.group.latent is None else None
    append(arena, k, stored_v, _new_rows(step, layer), sealing)
    if sealing is not None:
        return
    for seal in step.seals:
        _flush(codec, LayerRecords(step.group, layer, arena), seal)


def _flush(codec: Codec, records: LayerRecords, seal: Seal) -> None:
    """Seal a tail with the codec's own encoder, where the append kernel does not."""
    group = records.group
    at = seal.records
    segments = None
    if group.segment is not None and len(at.segments) and not seal.begins_segment:
        segments = records.read(group.segment, at.segments)
    side, kept_pages = records.read_kept(at)
    before = Encoded(records.arena.new_zeros(0), segments, side, kept_pages)
    k, v = records.read_tail(at.tail)
    encoded = codec.flush(k, v, seal.first, records.layer, before, group.first_head)
    records.write(group.decode_page, at.pages, encoded.blocks)
    if seal.begins_segment and encoded.segments is not None:
        records.write(group.layout(Kind.SEGMENT), at.segments, encoded.segments)
    records.write_kept(at, encoded)


class StepLayers:
    """A step of one layer group, layer by layer: new tokens are written, then attended from.

    Where the C library serves the whole step, each layer is one call into it, and what the calls
    share is made once.
    """

    def __init__(self, codec: Codec, step: GroupStep, arena: Tensor) -> None:
        self.step = step
        self._codec = codec
        self._arena = arena
        self._calls: LayerCalls | None = None
        # whether to ask the C library for such calls: once, where a sequence has one query
        self._try_calls = step.queries.shape[1] == 1 and not arena.is_cuda

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: Softmax,
        is_new: bool = True,
    ) -> Tensor:
        """q [Hq, N, D], k and v [H, N, D] of the step's rows -> [N, Hq, D] of q's dtype.

        Of latents, v is their channels of k, and what comes is [N, Hq, latent].
        is_new: k and v are to be written; else the pages have them from an earlier call
        """
        codec, step, arena = self._codec, self.step, self._arena
        new_q = q.transpose(0, 1)
        if self._try_calls:
            self._try_calls = False
            first = step.group.layers[0]
            views = views_of(step.group, first, arena, step.tables)
            rows = _new_rows(step, first)
            self._calls = prepare(arena, rows, views, new_q.unsqueeze(1))
        calls = self._calls
        has_seals = bool(step.seals) or step.completed is not None
        is_written = calls is None or has_seals or not is_new
        if is_new and is_written:
            write_step(codec, step, layer, arena, k.transpose(0, 1), v.transpose(0, 1))
        if calls is None:
            return attend_step(step, layer, arena, new_q, softmax)
        return calls.run(step.group.rank(layer), q, k, v, is_written, softmax)


def attend_step(
    step: GroupStep, layer: int, arena: Tensor, q: Tensor, softmax: Softmax
) -> Tensor:
    """Attention of the step's new tokens over everything they see: [N, Hq, D] of q's dtype.

    q: [N, Hq, D] - one row for each row of `step.rows`
    """
    is_single = step.queries.shape[1] == 1  # then each row is the query of its sequence
    rows = q.unsqueeze(1) if is_single else q[step.queries]
    views = views_of(step.group, layer, arena, step.tables)
    o = attend(rows, views, softmax, step.units)
    return o[:, 0] if is_single else o.flatten(0, 1)[step.answers]


def views_of(
    group: LayerGroup, layer: int, arena: Tensor, tables: Sequence[PageTable]
) -> list[View]:
    """A view of each table for attention; the tokens of two tables never overlap."""
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
    """The slots of a layer's new tokens."""
    raw = step.group.raw
    offset = step.group.layer_offset(raw, layer)
    return NewRows(step.pages, step.slots, exact_format(raw), offset)


def _sealing(codec: Codec, step: GroupStep, layer: int) -> Sealing | None:
    """How the append kernel of a layer seals full tails; None: the codec seals them."""
    group, rows = step.group, step.completed
    if rows is None or any(seal.begins_segment for seal in step.seals):
        return None
    fmt = codec.seal_format(group)
    if fmt is None:
        return None
    page = group.decode_page
    segment = group.segment_of(page)
    segment_offset = group.layer_offset(segment, layer) if segment else 0
    return Sealing(
        rows,
        fmt,
        base=group.layer_offset(page, layer),
        segment_base=segment_offset,
        seed=seed_of(layer, 0),
        head=group.first_head,
    )
