"""Decode steps in buffers that stay where they are, so that a recorded step can run on new inputs.

A step is cut into those of its codecs, and each to a shape that many steps have: its rows are
padded to a bucket, page tables and units of work to one of a few sizes, tails to their longest.
Padding is inert: a row that nobody asked for has token 0 at position 0, is not written to any page
and sees no token.

    rows      │ a │ b │ c │ d │ e │
    codec 1   │ a │ c │ d │ - │        bucket of 4
    codec 2   │ b │ e │                bucket of 2
"""

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from disagg.kernels.sealing import NO_PAGE, SealRows
from disagg.kernels.view import WorkPlan
from disagg.kv.plan import LayerGroup
from disagg.model.attention import Batch, Decode
from disagg.paged.append import seal_rows
from disagg.paged.page_tables import GroupStep, PageTable, Upload, room_for_units

SMALL_BUCKETS = (1, 2, 4)
BUCKET = 8  # above, buckets are multiples of this
ROOM = 1024  # of the smallest tables, in tokens or units; each larger size has four times as much

Key = tuple[object, ...]
Size = tuple[
    int, int
]  # of a step: the tokens of its page tables, and its units of work on a GPU


def bucket_of(count: int) -> int:
    """The least bucket that holds `count` rows."""
    return next((x for x in SMALL_BUCKETS if count <= x), -(-count // BUCKET) * BUCKET)


def rooms(most: int, least: int = 0) -> list[int]:
    """The sizes, of tokens or units, that `least` to `most` need; the last one holds all."""
    found = [least or ROOM]
    while found[-1] < most:
        found.append(4 * found[-1])
    return found


def parts_of(batch: Batch) -> list[Batch]:
    """A batch of one token of each sequence by its codecs, each the only one of its rows; none of
    any other, nor where a page is sealed that the append cannot seal.

    outputs: of each row, where among those of the batch its logits belong; else behind the last
    """
    found: dict[tuple[int, ...], list[Decode]] = {}
    for decode in batch.decodes:
        sealed = not decode.step.seals or _seals(decode)
        if batch.chunks or decode.step.queries.shape[1] > 1 or not sealed:
            return []
        found.setdefault(tuple(decode.step.rows.tolist()), []).append(decode)
    if sum(map(len, found)) != len(
        batch.tokens
    ):  # plans that have some of their layers in common
        return []
    places = {row: place for place, row in enumerate(batch.outputs)}
    return [
        Batch(
            [batch.tokens[row] for row in rows],
            [batch.positions[row] for row in rows],
            [places.get(row, len(places)) for row in rows],
            batch.arena,
            decodes=tuple(replace(decode, whole=True) for decode in decodes),
        )
        for rows, decodes in found.items()
    ]


def size_of(part: Batch) -> Size:
    """The least size of a step that can serve a part."""
    steps = [decode.step for decode in part.decodes]
    tables = ((x, step.group) for step in steps for x in step.tables)
    tokens = (
        x.pages.shape[1] * x.layout.tokens
        for x, group in tables
        if not _is_tail(x, group)
    )
    units = (len(step.units.table) for step in steps if step.units is not None)
    return rooms(max(tokens, default=0))[-1], rooms(max(units, default=0))[-1]


def sizes_of(part: Batch, context: int) -> Iterator[Size]:
    """All sizes of steps of as many rows, from that of a part up to those of `context` tokens; the
    largest first, so that the graphs of others fit into its memory."""
    steps = [decode.step for decode in part.decodes if decode.step.units is not None]
    least, least_units = size_of(part)
    for tokens in reversed(rooms(context, least)) if context else ():
        tables = ((x.group, _padded_tables(x, tokens)) for x in steps)
        most = (room_for_units(*given, part.arena.device) for given in tables)
        for units in reversed(rooms(max(most, default=0), least_units)):
            yield tokens, units


def key_of(part: Batch, size: Size) -> Key:
    """What a part has in common with those that one recorded step of a size can serve."""
    steps = [decode.step for decode in part.decodes]
    layouts = [
        [(x.layout.fingerprint, x.sides is None) for x in step.tables] for step in steps
    ]
    groups = zip(
        (step.group.fingerprint for step in steps), map(tuple, layouts), strict=True
    )
    return (bucket_of(len(part.tokens)), part.arena.data_ptr(), size, *groups)


class StaticStep:
    """The buffers of one shape of step: all in one, which one copy fills.

    tokens, positions: [1, bucket] int32 · outputs: [bucket] int32 · batch: what attention is to
    follow, over the buffers
    """

    def __init__(self, like: Batch, size: Size):
        self._size = size
        self._inputs = Upload(_padded(like, size), like.arena.device)
        self.tokens, self.positions, self.outputs, steps = self._inputs.tree
        decodes = zip(like.decodes, steps, strict=True)
        on_device = tuple(replace(decode, step=step) for decode, step in decodes)
        self.batch = Batch((), (), (), like.arena, decodes=on_device)

    def fill(self, batch: Batch) -> None:
        """Take the inputs of a batch with the same key."""
        self._inputs.fill(_padded(batch, self._size))


def _padded(
    batch: Batch, size: Size
) -> tuple[Tensor, Tensor, Tensor, tuple[GroupStep, ...]]:
    """Tokens, positions, outputs and steps of a batch on the host, as large as those of its key."""
    bucket, device = bucket_of(len(batch.tokens)), batch.arena.device
    tokens, positions, outputs = (
        _extended(torch.tensor(x, dtype=torch.int32), bucket, 0)
        for x in (batch.tokens, batch.positions, batch.outputs)
    )
    steps = tuple(_padded_step(decode, device, size) for decode in batch.decodes)
    return tokens[None], positions[None], outputs, steps


def _seals(decode: Decode) -> bool:
    """Whether the append of a step seals the pages that it completes; the first of a sequence may
    begin a segment, which it cannot."""
    if any(seal.fresh for seal in decode.step.seals):
        return False
    return decode.codec.seal_format(decode.step.group.head_dim) is not None


def _is_tail(table: PageTable, group: LayerGroup) -> bool:
    return table.layout == group.raw != group.page


def _columns(table: PageTable, group: LayerGroup, tokens: int) -> tuple[int, int]:
    """Pages and segments of a padded table; tails and kept tokens, which are few, have room for as
    many as there ever are. The first segment that a window shows may be shown in part."""
    if _is_tail(table, group):
        tokens = max(group.sink + group.residual + group.page.tokens, group.kept_limit)
    return -(-tokens // table.layout.tokens), -(-tokens // group.segment_tokens) + 1


def _padded_step(decode: Decode, device: torch.device, size: Size) -> GroupStep:
    step, units = decode.step, decode.step.units
    rows, tables = bucket_of(len(step.rows)), _padded_tables(step, size[0])
    if units is not None:
        room = min(size[1], room_for_units(step.group, tables, device))
        units = WorkPlan(
            _extended(units.table, room, 0),
            _extended(units.starts, rows + 1, units.starts[-1]),
        )
    return replace(
        step,
        rows=torch.arange(rows, dtype=torch.int32),
        pages=_extended(step.pages, rows, NO_PAGE),
        slots=_extended(step.slots, rows, step.slots[0]),
        seals=(),
        completed=_padded_rows(step, rows) if _seals(decode) else None,
        queries=torch.arange(rows, dtype=torch.int32).unsqueeze(1),
        answers=torch.arange(rows, dtype=torch.int32),
        tables=tables,
        units=units,
        freed=(),
    )


def _padded_rows(step: GroupStep, rows: int) -> SealRows:
    """What rows complete; those added complete nothing."""
    given = step.completed or seal_rows(step.group, (), len(step.rows))
    found = {
        x.name: _extended(getattr(given, x.name), rows, NO_PAGE)
        for x in fields(SealRows)
    }
    return SealRows(**found)


def _padded_tables(step: GroupStep, tokens: int) -> tuple[PageTable, ...]:
    """Tables with more rows and columns, which see nothing and point to what is there."""
    rows = bucket_of(len(step.rows))

    def wider(x: Tensor, columns: int) -> Tensor:
        wide = x[:1, :1].repeat(rows, columns)
        wide[: x.shape[0], : x.shape[1]] = x
        return wide

    def enlarged(table: PageTable) -> PageTable:
        pages, segments = _columns(table, step.group, tokens)
        return replace(
            table,
            pages=wider(table.pages, pages),
            lo=_extended(table.lo, rows, 0),
            hi=_extended(table.hi, rows, 0),
            segments=None
            if table.segments is None
            else wider(table.segments, segments),
            owner=None if table.owner is None else wider(table.owner, pages),
            sides=None
            if table.sides is None
            else _extended(table.sides, rows, table.sides[0]),
        )

    return tuple(map(enlarged, step.tables))


def _extended(x: Tensor, rows: int, value: Tensor | int) -> Tensor:
    """x with as many rows, those added all of one value."""
    added = torch.as_tensor(value, dtype=x.dtype).expand(rows - len(x), *x.shape[1:])
    return torch.cat([x, added])
