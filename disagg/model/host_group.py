"""Collectives of ranks that run on one host, on CPUs, through memory that they share.

    memory    counters of all ranks | rank 0: half, half | rank 1: half, half | ...

A rank writes its numbers into its half, arrives, waits for the others, and adds up the halves of
all in the order of ranks. So each gets the same bits, whatever the number of rows. Halves are used
by turns: who has arrived at meeting n has read all of meeting n - 1, so once all have, the halves
of n - 1 may be written again.

It is for steps of a few milliseconds with two collectives a layer, where gloo takes a millisecond
or more for each (benchmarks/results/ranks_gloo.json).
"""

import mmap
import os
import secrets
import select
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ReduceOp

from disagg.kernels.cpu import meeting
from disagg.kernels.cpu.meeting import COUNTER_BYTES, Meetings

HALF_BYTES = 1 << 20  # larger tensors are exchanged in pieces
KEY_BYTES = 32
CHECK_S = 0.02  # between two looks at the processes of ranks that are late
NOWHERE = "0"  # in place of the process of a rank that does not see the memory


def join_host(
    store: PrefixStore, rank: int, ranks: int, timeout: timedelta
) -> "HostGroup | None":
    """The group, if all its ranks see one memory and each other's processes; else None, on all.

    RuntimeError if the others do not come to the store within its timeout.
    """
    size = ranks * (COUNTER_BYTES + 2 * HALF_BYTES) + KEY_BYTES
    file = _make(store, size) if rank == 0 else _open(store)
    memory = None
    if file is not None:
        with suppress(OSError):  # no room for it
            memory = mmap.mmap(file, size)
    store.set(f"process {rank}", NOWHERE if memory is None else str(os.getpid()))
    processes = [store.get(f"process {number}").decode() for number in range(ranks)]
    if file is not None:
        os.close(file)  # all have opened it, and it ends with its last user
    if memory is None or NOWHERE in processes:
        return None
    return HostGroup(store, memory, rank, [*map(int, processes)], timeout)


def _make(store: PrefixStore, size: int) -> int | None:
    """A file in memory, and a note of where others find it; None where there is none."""
    file = _allocate(size)
    if file is None:
        store.set("memory", "")
        return None
    key = secrets.token_bytes(KEY_BYTES)
    os.pwrite(file, key, size - KEY_BYTES)
    store.set("memory", f"/proc/{os.getpid()}/fd/{file} {key.hex()}")
    return file


def _allocate(size: int) -> int | None:
    """A file in memory that has all its bytes; None without room, and where ranks cannot meet."""
    if not _can_meet():
        return None
    file = os.memfd_create("disagg-ranks")
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        return None
    return file


def _open(store: PrefixStore) -> int | None:
    """The file that rank 0 made; None if it is not of this host."""
    note = store.get("memory").decode()
    if not note or not _can_meet():
        return None
    path, key = note.split()
    with suppress(OSError):
        file = os.open(path, os.O_RDWR)
        size = os.fstat(file).st_size
        if os.pread(file, KEY_BYTES, size - KEY_BYTES) == bytes.fromhex(key):
            return file
        os.close(file)  # another host has a process of that number
    return None


def _can_meet() -> bool:
    """Whether this machine has the C library, and calls of Linux that older ones lack."""
    if sys.platform != "linux" or not meeting.is_served():
        return False
    try:
        return not _has_ended(os.getpid())
    except OSError:
        return False


def _has_ended(process: int) -> bool:
    """Whether a process has ended, also if nobody has asked for its exit status yet."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


class HostGroup:
    """Ranks of one host, with those calls of torch's process groups that RankGroup makes.

    A call fails with RuntimeError when another rank has ended, or does not come in time.

    store:     where they met; held, because rank 0's ends with it and others may still read
    memory:    shared by all, zero at first
    rank:      of this process
    processes: of each rank
    timeout:   of a call, from when this rank makes it
    """

    def __init__(
        self,
        store: PrefixStore,
        memory: mmap.mmap,
        rank: int,
        processes: Sequence[int],
        timeout: timedelta,
    ):
        self._store = store
        self._memory = memory
        self._rank = rank
        self._processes = processes
        self._ranks = len(processes)
        self._timeout_s = timeout.total_seconds()
        self._turn = 0
        self._halves: dict[torch.dtype, list[list[Tensor]]] = {}
        counters = torch.frombuffer(memory, dtype=torch.int64, count=1)
        self._meetings = Meetings(counters.data_ptr(), rank, self._ranks)

    def allreduce(self, tensors: Sequence[Tensor], options: AllreduceOptions) -> None:
        """Sum one tensor over all ranks, or take the maximum, in place."""
        (x,) = tensors
        is_max = options.reduceOp == ReduceOp(ReduceOp.MAX)
        combine: Any = torch.maximum if is_max else torch.add
        for piece in _pieces(x):
            first, *others = self._exchange(piece)
            piece.copy_(first)
            for other in others:
                combine(piece, other, out=piece)

    def _allgather_base(self, output: Tensor, part: Tensor, _: Any) -> None:
        """Write the parts of all ranks into output, one behind the other."""
        targets = [_pieces(x) for x in output.view(-1).chunk(self._ranks)]
        for piece, *of_ranks in zip(_pieces(part), *targets, strict=True):
            for target, half in zip(of_ranks, self._exchange(piece), strict=True):
                target.copy_(half)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """What each rank brings. It stays until this rank has come to the next meeting."""
        self._turn = 1 - self._turn
        halves = [half[: len(piece)] for half in self._halves_of(piece.dtype)]
        halves[self._rank].copy_(piece)
        self._meetings.arrive()
        self._wait()
        return halves

    def _halves_of(self, dtype: torch.dtype) -> list[Tensor]:
        """The half of each rank whose turn it is: [HALF_BYTES / bytes of a number] each."""
        if dtype not in self._halves:
            count = HALF_BYTES // dtype.itemsize
            begin = self._ranks * COUNTER_BYTES
            self._halves[dtype] = [
                [
                    torch.frombuffer(
                        self._memory,
                        dtype=dtype,
                        count=count,
                        offset=begin + (2 * rank + turn) * HALF_BYTES,
                    )
                    for rank in range(self._ranks)
                ]
                for turn in range(2)
            ]
        return self._halves[dtype][self._turn]

    def _wait(self) -> None:
        until = time.monotonic() + self._timeout_s
        while (late := self._meetings.wait(CHECK_S)) is not None:
            if _has_ended(self._processes[late]) and self._meetings.wait(0) == late:
                raise RuntimeError(f"rank {late} has ended")
            if time.monotonic() > until:
                raise RuntimeError(
                    f"timed out: rank {late} has not come for {self._timeout_s:g} s"
                )


def _pieces(x: Tensor) -> Sequence[Tensor]:
    return x.view(-1).split(HALF_BYTES // x.element_size())
