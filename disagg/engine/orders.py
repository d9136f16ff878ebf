"""What rank 0 tells the followers of its group: one order a step, with all that it writes.

    rank 0     schedule, allocate, build ─► StepOrder ─► forward, with the others ─► sample
    follower                                StepOrder ─► the same pages, its own heads ─► forward

Only rank 0 has a scheduler, a pool and a sampler. Page ids are addresses, and all arenas of a group
have one size, so an id means the same place in each. All that a step writes is written before its
last collective, so rank 0 may release pages once its own step has ended. Pages that a follower
reads at the beginning of a step stay owned until then.

An order is a dataclass of host numbers; `pack_order` makes it bytes.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from disagg.engine.sequence import Sequence as EngineSequence
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState
from disagg.model.attention import Batch, Decode, PartSizes
from disagg.model.cache import Workspace
from disagg.paged.page_tables import ChunkTables


@dataclass(frozen=True)
class ArenaOrder:
    """An engine begins: its arena, and the form in which states are handed off."""

    nbytes: int
    scratch: int
    state_form: str


@dataclass(frozen=True)
class PromptOrder:
    """A prompt begins.

    number:   names it in later orders
    rid:      of its hand-off, if `hands_off`
    codec:    spec of its plan
    total:    its tokens · cached: those that are read from the prefix cache
    rooms:    as of `Workspace` · reserved: all of it is allocated now
    prefix:   raw pages of the cached tokens, by layer group of the prefix cache
    """

    number: int
    rid: str
    codec: str
    total: int
    cached: int
    rooms: tuple[int, ...]
    reserved: bool
    prefix: tuple[tuple[int, ...], ...]
    hands_off: bool


@dataclass(frozen=True)
class ChunkOrder:
    """The next tokens of a prompt, as `Chunk`; first_unit: the first that it adds to the cache."""

    number: int
    row: int
    count: int
    before: int
    first_unit: int
    tables: ChunkTables


@dataclass(frozen=True)
class HandoffOrder:
    """The records of a hand-off are allocated, or a sequence that moves has stopped."""

    rid: str
    codec: str
    groups: tuple[GroupState, ...]


@dataclass(frozen=True)
class CopyOrder:
    """A hand-off between two engines of one process.

    source: number of the engine whose arena is read
    spans:  the start in either arena, source first, and bytes
    """

    source: int
    spans: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class StepOrder:
    """One step: what begins and ends before it, and its batch.

    recordings: as of `Batch`
    ended: numbers of prompts
    """

    tokens: Sequence[int] = ()
    positions: Sequence[int] = ()
    outputs: Sequence[int] = ()
    long_rows: Sequence[bool] = ()
    recordings: tuple[PartSizes, ...] | None = None
    decodes: tuple[Decode, ...] = ()
    chunks: tuple[ChunkOrder, ...] = ()
    handoffs: tuple[HandoffOrder, ...] = ()
    begun: tuple[PromptOrder, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True)
class BeginOrder:
    """All is compiled and recorded: from now on a collective has the group's timeout."""


Order = ArenaOrder | BeginOrder | CopyOrder | StepOrder


@dataclass
class StepOrders:
    """The orders of one engine of rank 0. On the engine's thread.

    send: brings an order to all followers
    """

    send: Callable[[Order], None]
    _numbers: Iterator[int] = field(default_factory=count)
    # prompts that followers have, and their workspaces
    _open: dict[int, tuple[EngineSequence, Workspace]] = field(default_factory=dict)
    _begun: list[PromptOrder] = field(default_factory=list)
    _handoffs: list[HandoffOrder] = field(default_factory=list)
    _chunks: list[ChunkOrder] = field(default_factory=list)

    def begin_handoff(self, rid: str, plan: Plan, groups: Sequence[GroupState]) -> None:
        """Before the next step, a hand-off gets its records."""
        order = HandoffOrder(rid, plan.spec, tuple(deepcopy(groups)))
        self._handoffs.append(order)

    def begin_prompt(
        self, sequence: EngineSequence, rooms: Sequence[int], reserved: bool
    ) -> None:
        """Before the next step, a prompt gets a workspace with its cached prefix."""
        assert sequence.workspace is not None
        number = next(self._numbers)
        self._open[number] = (sequence, sequence.workspace)
        order = PromptOrder(
            number=number,
            rid=sequence.rid,
            codec=sequence.plan.spec,
            total=sequence.prompt_len,
            cached=sequence.cached,
            rooms=tuple(rooms),
            reserved=reserved,
            prefix=tuple(map(tuple, sequence.prefix_pages)),
            hands_off=sequence.handoff is not None,
        )
        self._begun.append(order)

    def add_chunk(
        self,
        workspace: Workspace,
        row: int,
        count: int,
        before: int,
        first_unit: int,
        tables: ChunkTables,
    ) -> None:
        """The next step computes a chunk of a prompt."""
        (number,) = [n for n, (_, own) in self._open.items() if own is workspace]
        order = ChunkOrder(number, row, count, before, first_unit, tables)
        self._chunks.append(order)

    def send_step(self, batch: Batch) -> None:
        """Let the followers take part in a forward pass, which this rank begins now."""
        order = StepOrder(
            tokens=batch.tokens,
            positions=batch.positions,
            outputs=batch.outputs,
            long_rows=batch.long_rows,
            recordings=batch.recordings,
            decodes=batch.decodes,
            chunks=tuple(self._chunks),
            handoffs=tuple(self._handoffs),
            begun=tuple(self._begun),
            ended=tuple(self._take_ended()),
        )
        self._clear()
        self.send(order)

    def send_handoffs(self) -> None:
        """Let hand-offs go on where no step follows."""
        if self._handoffs:
            self.send(StepOrder(handoffs=tuple(self._handoffs)))
            self._handoffs = []

    def _take_ended(self) -> list[int]:
        ended = [n for n, (x, own) in self._open.items() if x.workspace is not own]
        for number in ended:
            del self._open[number]
        return ended

    def _clear(self) -> None:
        self._chunks = []
        self._handoffs = []
        self._begun = []


def pack_order(message: Any) -> bytes:
    """An order as bytes; tensors on the host become arrays, which take a tenth of the time."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(message)
    return stream.getvalue()


def unpack_order(data: bytes) -> Any:
    """The order of these bytes, which come from rank 0 alone."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented
