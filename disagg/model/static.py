"""Decode steps in buffers that stay where they are, so that a recorded step can run on new inputs.

A step is cut to a shape that many steps have: its rows and the rows of each layer group are padded
to a bucket, page tables to a power of two. Padding is inert: a row that nobody asked for has token
0 at position 0, and a padding row of a group is its first row once more; neither is written to any
page or sees a token, so a padding row adds 0 to the attention of the row that it repeats.

    rows     │ a │ b │ c │ - │        bucket of 4
    group 1  │ a │ c │                bucket of 2
    group 2  │ b │                    bucket of 1
"""

from dataclasses import fields, replace

import torch
from torch import Tensor

from disagg.codecs.seals import seal_rows
from disagg.codecs.tables import GroupStep, PageTable, room_for_units
from disagg.kernels.sealing import NO_PAGE, SealRows
from disagg.model.attention import Batch, Decode

SMALL_BUCKETS = (1, 2, 4)
BUCKET = 8  # above, buckets are multiples of this

Key = tuple[object, ...]


def bucket_of(count: int) -> int:
    """The least bucket that holds `count` rows."""
    for bucket in SMALL_BUCKETS:
        if count <= bucket:
            return bucket
    return -(-count // BUCKET) * BUCKET


def width_of(count: int) -> int:
    """The least power of two that holds `count` columns of a page table."""
    return 1 << max(0, count - 1).bit_length()


def is_plain(batch: Batch) -> bool:
    """Whether a batch is one token of each sequence, and what it seals is sealed by the append."""
    plain = all(
        decode.step.queries.shape[1] == 1 and (not decode.step.seals or _seals(decode))
        for decode in batch.decodes
    )
    return plain and bool(batch.decodes) and not batch.chunks


def key_of(batch: Batch) -> Key:
    """What a plain batch has in common with those that one recorded step can serve."""
    groups = [
        (
            decode.step.group.fingerprint,
            decode.whole,
            bucket_of(len(decode.step.rows)),
            _shapes_of(decode.step.sealed),
            _shapes_of(decode.step.tail),
        )
        for decode in _in_order(batch)
    ]
    return (bucket_of(len(batch.tokens)), batch.arena.data_ptr(), *groups)


class StaticStep:
    """The buffers of one shape of step.

    tokens, positions: [1, bucket] int64 · batch: what attention is to follow, over the buffers
    """

    def __init__(self, like: Batch):
        bucket, device = bucket_of(len(like.tokens)), like.arena.device
        self.tokens = torch.zeros(1, bucket, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        decodes = [replace(x, step=_static_step(x)) for x in _in_order(like)]
        self.batch = Batch((), (), (), like.arena, decodes=tuple(decodes))

    def fill(self, batch: Batch) -> None:
        """Take the inputs of a batch with the same key."""
        for buffer, values in ((self.tokens, batch.tokens), (self.positions, batch.positions)):
            buffer.zero_()
            buffer[0, : len(values)] = torch.tensor(values, dtype=torch.int64)
        for static, given in zip(self.batch.decodes, _in_order(batch), strict=True):
            _fill_step(static.step, given.step)


def _seals(decode: Decode) -> bool:
    """Whether the append of a step seals the pages that it completes."""
    return decode.codec.seal_format(decode.step.group.head_dim) is not None


def _in_order(batch: Batch) -> list[Decode]:
    """The decodes of a plain batch: one for each layer group, whatever came first."""
    return sorted(batch.decodes, key=lambda decode: decode.step.group.fingerprint)


def _tables_of(step: GroupStep) -> list[PageTable]:
    return _chain(step.sealed) + _chain(step.tail)


def _chain(table: PageTable | None) -> list[PageTable]:
    found = []
    while table is not None:
        found.append(table)
        table = table.following
    return found


def _shapes_of(table: PageTable | None) -> Key:
    """The layouts of a chain of tables, and how wide their columns are."""
    return tuple(
        (
            part.layout.fingerprint,
            *(0 if x is None else width_of(x.shape[1]) for x in (part.pages, part.segments)),
            0 if part.kept is None else width_of(part.kept.shape[1]),
        )
        for part in _chain(table)
    )


def _static_step(decode: Decode) -> GroupStep:
    """Buffers for steps like this one."""
    step = decode.step
    rows = bucket_of(len(step.rows))
    device = step.rows.device
    return replace(
        step,
        rows=torch.zeros(rows, dtype=step.rows.dtype, device=device),
        pages=torch.zeros(rows, dtype=torch.int32, device=device),
        slots=torch.zeros(rows, dtype=torch.int32, device=device),
        seals=(),
        completed=seal_rows(step.group, (), rows, device) if _seals(decode) else None,
        queries=torch.arange(rows, device=device).unsqueeze(1),
        valid=torch.ones(rows, 1, dtype=torch.bool, device=device),
        sealed=_static_table(step.sealed, rows, step.group.heads),
        tail=_static_table(step.tail, rows, step.group.heads),
        freed=(),
    )


def _static_table(table: PageTable | None, rows: int, heads: int) -> PageTable | None:
    if table is None:
        return None

    def buffer(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x.new_zeros(rows, width_of(x.shape[1]))

    static = PageTable(
        pages=table.pages.new_zeros(rows, width_of(table.pages.shape[1])),
        lo=table.lo.new_zeros(rows, 1),
        hi=table.hi.new_zeros(rows, 1),
        layout=table.layout,
        segments=buffer(table.segments),
        owner=buffer(table.owner),
        following=_static_table(table.following, rows, heads),
        kept=buffer(table.kept),
        sides=None if table.sides is None else table.sides.new_zeros(rows),
    )
    return replace(static, units=room_for_units(static, heads))


def _fill_step(static: GroupStep, given: GroupStep) -> None:
    for name in ("rows", "slots"):
        _repeat_first(getattr(static, name), getattr(given, name))
    static.pages.fill_(NO_PAGE)
    static.pages[: len(given.pages)] = given.pages
    if static.completed is not None:
        _fill_completed(static.completed, given.completed)
    for into, table in zip(_tables_of(static), _tables_of(given), strict=True):
        _fill_table(into, table)


def _fill_completed(static: SealRows, given: SealRows | None) -> None:
    """Copy what rows complete; all other rows complete nothing."""
    static.pages.fill_(NO_PAGE)
    if given is None:
        return
    for field in fields(SealRows):
        values = getattr(given, field.name)
        getattr(static, field.name)[: len(values)] = values


def _fill_table(static: PageTable, given: PageTable) -> None:
    """Copy a table; what is added sees nothing and points to what is there."""
    for name in ("lo", "hi"):
        buffer, values = getattr(static, name), getattr(given, name)
        buffer.zero_()
        buffer[: len(values)] = values
    for name in ("pages", "segments", "owner", "kept", "sides"):
        if getattr(given, name) is not None:
            _repeat_first(getattr(static, name), getattr(given, name))
    if static.units is not None and given.units is not None:
        static.units.table.zero_()
        static.units.table[: len(given.units.table)] = given.units.table
        static.units.starts.copy_(given.units.starts[-1].expand_as(static.units.starts))
        static.units.starts[: len(given.units.starts)] = given.units.starts


def _repeat_first(buffer: Tensor, values: Tensor) -> None:
    """Copy values into a buffer that is at least as large; elsewhere stands the first of them."""
    buffer.copy_(values[(slice(0, 1),) * values.ndim].expand_as(buffer))
    buffer[tuple(slice(0, size) for size in values.shape)] = values
