"""The ranks of one worker, and what they compute together: sums, maxima and gathered columns.

Collectives go through a process group of torch, NCCL on GPUs and gloo on CPUs, or, on one host's
CPUs, through memory (host_group.py). It is no global one, so a process may be in several. A rank
that hangs is seen by a timeout; one that has ended at once.

NCCL's collectives are in CUDA graphs (graphs.py). Three things follow: they run on the stream that
is recorded; torch watches none that is replayed, so `finish` does; and graphs end before the group.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from socket import socket
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    TCPStore,
)
from torch.nn.functional import pad

from disagg.errors import RanksLostError
from disagg.model.host_group import HostGroup, join_host

JOIN_S = 60.0  # for all ranks, which are there, to reach each other
LOAD_S = 1800.0  # ranks read their weights and compile at different speeds
LEAVE_S = 2.0  # for NCCL to give up what runs
POLL_S = 1e-4  # between two looks at a GPU
# what the environment does not set. Ranks connect in their first collective, not in a recording;
# a recording exchanges nothing with other ranks, so one that fails keeps none of them waiting
NCCL_SETTINGS = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_GRAPH_REGISTER": "0"}


def open_store(listening: socket) -> TCPStore:
    """The store where the ranks of a group meet: of rank 0, on a socket that it takes over."""
    host, port, *_ = listening.getsockname()
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=LOAD_S),
        master_listen_fd=listening.detach(),
    )


def join_store(host: str, port: int) -> TCPStore:
    """The same store as another rank sees it; RanksLostError if that cannot reach it."""
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_S))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        text = f"the store of rank 0 at {host}:{port} is not reached: {reason}"
        raise RanksLostError(text) from error
    store.set_timeout(timedelta(seconds=LOAD_S))
    return store


class RankGroup:
    """The ranks that compute one model, as one of them sees them. On the engine's thread.

    rank:      number of this process, from 0
    ranks:     processes of the group
    timeout_s: after which a collective fails with RanksLostError, from `begin_serving` on
    host:      of this rank, where the others of a group on CPUs reach it
    """

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        ranks: int,
        timeout_s: float,
        device: str = "cpu",
        host: str = "127.0.0.1",
    ):
        self.rank = rank
        self.ranks = ranks
        named = PrefixStore(device, store)
        self._serving_s = timeout_s
        self._timeout_s = LOAD_S
        self._device = device
        self._is_alone = False
        self._ended = Event()
        self._sums = _reduces(ReduceOp.SUM)
        self._maxima = _reduces(ReduceOp.MAX)
        self._gathers = AllgatherOptions()
        self._gathers.asyncOp = False
        try:
            if device == "cuda":
                self._group = _nccl(named, rank, ranks)
            else:
                self._group = _on_host(named, rank, ranks) or _gloo(
                    named, rank, ranks, host
                )
        except RuntimeError as error:
            raise _lost(rank, error) from error

    def begin_serving(self) -> None:
        """Models are loaded, steps recorded: from now on each collective has only `timeout_s`."""
        self._timeout_s = self._serving_s
        # torch ends the process when NCCL's time is over: `finish` says so before
        factor = 2 if self._device == "cuda" else 1
        timeout = timedelta(seconds=factor * self._timeout_s)
        self._group._set_default_timeout(timeout)

    def abandon(self) -> None:
        """Another rank has ended, so `finish` waits no longer. From any thread."""
        self._ended.set()

    def leave(self) -> None:
        """Give up what runs. No CUDA graph may be left with collectives: NCCL would wait for it."""
        if self._device == "cuda":
            abort = Thread(target=self._group.abort, name="nccl-abort", daemon=True)
            abort.start()
            abort.join(LEAVE_S)

    def sum(self, x: Tensor) -> Tensor:
        """x summed over all ranks, in place; the same bits on each."""
        return self._reduce(x, self._sums)

    def max(self, x: Tensor) -> Tensor:
        """The largest x of all ranks, in place."""
        return self._reduce(x, self._maxima)

    def agree(self, vote: bool, device: torch.device) -> bool:
        """Whether all ranks vote yes."""
        refusals = torch.tensor([not vote], dtype=torch.float32, device=device)
        return not self.max(refusals).item()

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        """The columns of all ranks side by side: [N, own width] -> [N, all widths].

        widths: of each rank
        """
        widest = max(widths)
        padded = pad(x, (0, widest - x.shape[1])).contiguous()
        parts = padded.new_empty(self.ranks * len(x), widest)
        if not self._is_alone:
            with self._finding_losses():
                _wait(self._group._allgather_base(parts, padded, self._gathers))
        by_rank = zip(parts.chunk(self.ranks), widths, strict=True)
        return torch.cat([part[:, :n] for part, n in by_rank], 1)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In it, collectives return at once, with no other rank's numbers: a rehearsal.

        What breaks in it keeps no other rank waiting.
        """
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @contextmanager
    def all_or_none(self, device: torch.device) -> Iterator[None]:
        """RuntimeError on all ranks where one raises it. In it no rank may wait for another."""
        refusal = None
        try:
            yield
        except RuntimeError as error:
            refusal = error
        if not self.agree(refusal is None, device):
            raise refusal or RuntimeError("another rank of the group could not")

    def finish(self, device: torch.device) -> None:
        """Return when the GPU has done all that this thread gave to it; on a CPU, at once.

        RanksLostError after `timeout_s`, or when another rank has ended.
        """
        if device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        until = time.monotonic() + self._timeout_s
        while not done.query():
            if self._ended.wait(POLL_S):
                raise RanksLostError(f"rank {self.rank} waits for a rank that ended")
            if time.monotonic() > until:
                raise RanksLostError(
                    f"rank {self.rank} timed out: a step has taken {self._timeout_s:g} s"
                )

    def _reduce(self, x: Tensor, options: AllreduceOptions) -> Tensor:
        if not self._is_alone:
            with self._finding_losses():
                _wait(self._group.allreduce([x], options))
        return x

    @contextmanager
    def _finding_losses(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise _lost(self.rank, error) from error


def _wait(work: Any) -> None:
    if work is not None:  # NCCL's has its place in the stream, that in memory is done
        work.wait()


def _reduces(op: Any) -> AllreduceOptions:
    """Options of a reduction on the current stream, so that it may be recorded."""
    options = AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = False
    return options


def _on_host(store: PrefixStore, rank: int, ranks: int) -> HostGroup | None:
    loading = timedelta(seconds=LOAD_S)
    store.set_timeout(timedelta(seconds=JOIN_S))
    group = join_host(store, rank, ranks, loading)
    store.set_timeout(loading)
    return group


def _gloo(store: PrefixStore, rank: int, ranks: int, host: str) -> Any:
    gloo: Any = ProcessGroupGloo  # stubs lack its options
    options = gloo._Options()
    options._timeout = timedelta(seconds=JOIN_S)
    options._devices = [gloo.create_device(hostname=host)]
    group = gloo(store, rank, ranks, options)
    group._set_default_timeout(timedelta(seconds=LOAD_S))
    return group


def _nccl(store: PrefixStore, rank: int, ranks: int) -> Any:
    # builds of torch for CPUs have no such class
    from torch.distributed import ProcessGroupNCCL

    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=LOAD_S)  # they connect after they have loaded
    return ProcessGroupNCCL(store, rank, ranks, options)


def _lost(rank: int, error: RuntimeError) -> RanksLostError:
    reason = " ".join(str(error).split())
    return RanksLostError(f"rank {rank} lost the other ranks of its group: {reason}")
