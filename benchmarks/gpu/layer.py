"""One layer of sequences in a dirty arena: prompts are written, then steps append and
attend.

The code is that of a decode step, kernel for kernel. On a GPU it runs; on tensors
without numbers its launches are noted, and compiled elsewhere; on a CPU it is the
reference, or the interpreter.

    arena   │ dirty, never touched ...             │ records │      page ids beyond 2^31 bytes
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.cases import Case
from disagg.bench.inputs import LAYER
from disagg.codecs import get_codec
from disagg.codecs.contract import Queries
from disagg.kernels import ops
from disagg.kernels.cpu import library
from disagg.kernels.gpu import attend, plan
from disagg.kernels.view import Softmax, WorkPlan
from disagg.kv.page import ARENA_UNIT
from disagg.kv.plan import RecordShape
from disagg.kv.state import GroupState, allocate_group
from disagg.paged.append import NewRecords, RecordIds, SequenceGrowth, take_records
from disagg.paged.compressed_kv import CompressedKV, GrowingArena
from disagg.paged.layer import (
    LayerRecords,
    PromptChunk,
    attend_step,
    write_prompt,
    write_step,
)
from disagg.paged.page_tables import GroupStep, appendable, plan_step, upload

LAST_QUERIES = 32  # of a prompt, for codecs that choose tokens by attention
DIRT = 0xFF  # read as a float of any width it is no number
CUDA = torch.device("cuda")
Inputs = tuple[Tensor, Tensor, Tensor]  # k, v [H, n, D] and q [Hq, n, D]


class DirtyArena(GrowingArena):
    """Records at the end of bytes that were there before; it does not grow.

    tensor: [bytes] u8; only the last `room` bytes are ever read or written
    """

    def __init__(self, tensor: Tensor, room: int):
        super().__init__(tensor.device)
        self.bytes = tensor
        self._first = (tensor.numel() - room) // ARENA_UNIT * ARENA_UNIT
        self.clear()

    def clear(self) -> None:
        """Forget all records, and leave dirt where they were."""
        self._end, self._free, self._sizes = self._first, {}, {}
        self.bytes[self._first :].fill_(DIRT)

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """As there, but pages are cleared all at once: there are thousands."""
        pages = super().allocate(replace(shape, zeroed=False), count)
        if shape.zeroed and pages:
            starts = [page * ARENA_UNIT for page in pages]
            torch._foreach_zero_([self.bytes[x : x + shape.nbytes] for x in starts])
        return pages

    def _extend(self, nbytes: int) -> int:
        start, self._end = self._end, self._end + nbytes
        if self._end > self.bytes.numel():
            room = self.bytes.numel() - self._first
            raise MemoryError(f"{nbytes} bytes more do not fit {room}")
        return start // ARENA_UNIT


class Layer:
    """The sequences of a case; `n` tokens of each so far.

    plans: the device that steps are planned for; "cuda" has the tables of a GPU
    """

    def __init__(self, case: Case, arena: GrowingArena, plans: torch.device = CUDA):
        self.case, self.arena, self._plans = case, arena, plans
        self.codec = get_codec(case.spec, case.head_dim)
        self.group = self.codec.layer_group(
            (LAYER,),
            case.heads,
            case.head_dim,
            case.dtype,
            case.window,
            case.latent or None,
        )
        lead = self.group.sink + self.group.residual
        counts = [case.pages + i * case.spread for i in range(case.sequences)]
        self.n = [self._full_tail(lead + x * self.group.page.tokens) for x in counts]
        self.states: list[GroupState] = []

    def _full_tail(self, n: int) -> int:
        """The least length from n on with which the next token seals a page."""
        while self.group.sealed(n + 1) == self.group.sealed(n):
            n += 1
        return n

    def scatter(self) -> None:
        """Let records of prompts lie in no order, as in a service that has run for a
        while.
        """
        ids = [x for n in self.n for x in self._allocate(n).ids()]
        random.Random(0).shuffle(ids)
        self.arena.release(ids)

    def _allocate(self, n: int) -> GroupState:
        return allocate_group(self.group, n, self.arena)

    def write_prompt(self, k: Tensor, v: Tensor, q: Tensor) -> None:
        """Encode the prompt of the next sequence: k, v [H, n, D], q [Hq, n, D]."""
        self.states.append(self._allocate(k.shape[1]))
        self.encode(len(self.states) - 1, k, v, q)

    def encode(self, row: int, k: Tensor, v: Tensor, q: Tensor) -> None:
        """Write a prompt once more, to the records of a sequence."""
        n = k.shape[1]
        arena = self.arena.bytes
        queries = Queries.of(q[:, -LAST_QUERIES:], self.case.heads, n)
        record_ids = upload(RecordIds.of(self.states[row]), arena.device)
        records = LayerRecords(self.group, LAYER, arena)
        prompt = PromptChunk(k, v, total=n, queries=queries)
        write_prompt(self.codec, records, record_ids, prompt)

    def block(self) -> int:
        """Tokens that all sequences may append in one step, as many as the case
        wants.
        """
        return min(appendable(self.group, n, self.case.block) for n in self.n)

    def plan(self, m: int) -> GroupStep:
        """The step in which every sequence appends m tokens, on the device."""
        growths, fresh = self.grow(m)
        planned = plan_step(self.codec, self.group, growths, fresh, self._plans)
        return upload(planned, self.arena.bytes.device)

    def grow(self, m: int) -> tuple[list[SequenceGrowth], NewRecords]:
        """Take the records for m tokens more of every sequence."""
        growths = [
            SequenceGrowth(state, n, m, row * m)
            for row, (state, n) in enumerate(zip(self.states, self.n, strict=True))
        ]
        self.n = [n + m for n in self.n]
        return growths, take_records(self.group, growths, self.arena)

    def append(self, step: GroupStep, k: Tensor, v: Tensor) -> None:
        """Write the new tokens of all sequences: k, v [N, H, D]."""
        write_step(self.codec, step, LAYER, self.arena.bytes, k, v)

    def attend(self, step: GroupStep, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attention of the new tokens: q [N, Hq, D] -> [N, Hq, D]."""
        softmax = Softmax(self.case.head_dim**-0.5, self.case.cap, sinks)
        return attend_step(step, LAYER, self.arena.bytes, q, softmax)

    @property
    def nbytes(self) -> int:
        """What attention of one step reads: pages, segments and side records of all
        sequences.
        """
        group, total = self.group, 0
        for state in self.states:
            total += (len(state.tail) + len(state.kept_pages)) * group.layer_bytes(
                group.raw
            )
            total += sum(len(x.pages) * group.layer_bytes(x.layout) for x in state.runs)
            segments = {x.segment: group.segment_of(x.layout) for x in state.runs}
            total += sum(group.layer_bytes(x) for x in segments.values() if x)
            total += group.layer_bytes(group.side) if group.side else 0
        return total

    def cache(self, row: int) -> CompressedKV:
        """One sequence, to be read back."""
        return CompressedKV(
            self.codec,
            self.group,
            self.states[row],
            self.arena,
            num_tokens=self.n[row],
        )


def widened(step: GroupStep, rows: int) -> GroupStep:
    """The same step over a table of this many units, of which the last have no work."""
    assert step.units is not None
    table = step.units.table
    idle = table.new_zeros(max(0, rows - len(table)), table.shape[1])
    units = WorkPlan(torch.cat([table, idle]), step.units.starts)
    return replace(step, units=units)


def sinks_of(case: Case, device: torch.device) -> Tensor | None:
    """One of each query head, where a case has them: [Hq] of its dtype."""
    if not case.sinks:
        return None
    numbers = torch.linspace(-2, 4, case.heads * case.per_head)
    return numbers.to(device, getattr(torch, case.dtype))


def tokens_of(case: Case, n: int, seed: int) -> Inputs:
    """Made-up k, v [H, n, D] and q [Hq, n, D] of a case, on the host."""
    source = torch.Generator().manual_seed(seed)
    heads, rows = case.heads, case.heads * case.per_head
    sizes = [(heads, n), (heads, n), (rows, n)]
    dtype = getattr(torch, case.dtype)
    k, v, q = (
        torch.randn(*x, case.head_dim, generator=source).to(dtype) for x in sizes
    )
    return k, k[..., : case.latent] if case.latent else v, q


def rows_of(inputs: Sequence[Inputs], device: torch.device) -> list[Tensor]:
    """k, v [N, H, D] and q [N, Hq, D] of a step, from those of each sequence."""
    joined = (torch.cat(parts, 1) for parts in zip(*inputs, strict=True))
    return [x.to(device).transpose(0, 1) for x in joined]


@dataclass(frozen=True)
class StandIn:
    """A GPU of so few processors that the interpreter gets through its units of
    work.
    """

    processors: int = 1


@contextmanager
def interpreted(gpu: StandIn | None = None) -> Iterator[None]:
    """Tensors of a CPU go the ways of a GPU; wants TRITON_INTERPRET before Triton is
    imported.
    """
    count = (gpu or StandIn()).processors
    with (
        patch.object(ops, "on_gpu", lambda _: True),
        patch.object(plan, "count_processors", lambda _: count),
    ):
        yield


@contextmanager
def by_reference() -> Iterator[None]:
    """Tensors of a CPU are computed by torch, whatever else would serve them."""
    with (
        patch.object(ops, "on_gpu", lambda x: x.is_cuda),
        library.forced(library.TORCH),
    ):
        yield


@contextmanager
def registers(most: int | None) -> Iterator[None]:
    """Attention compiled for at most this many registers a thread; None: as served."""
    options = plan.compile_options
    if most is None:
        yield
        return
    with patch.object(
        attend, "compile_options", lambda *x: options(*x) | {"maxnreg": most}
    ):
        yield
