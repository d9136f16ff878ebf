"""The ranks of one worker, and what they compute together: sums, maxima and gathered columns.

Collectives go through a process group of torch, gloo on CPUs and NCCL on GPUs. It is no global one,
so a process may be in several. A rank that hangs is seen by a timeout; one that has ended at once.
"""

from datetime import timedelta
from socket import socket
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    TCPStore,
)

from disagg.errors import RanksLostError

LOAD_S = 1800.0  # ranks read their weights at different speeds


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
    """The same store as another rank sees it."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=LOAD_S))


class RankGroup:
    """The ranks that compute one model, as one of them sees them. On the engine's thread.

    rank:      number of this process, from 0
    ranks:     processes of the group
    timeout_s: after which a collective fails with RanksLostError, once the model is loaded
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
        self._timeout = timedelta(seconds=timeout_s)
        timeout = timedelta(seconds=LOAD_S)
        try:
            if device == "cuda":
                self._group = _nccl(named, rank, ranks, timeout)
            else:
                self._group = _gloo(named, rank, ranks, timeout, host)
        except RuntimeError as error:
            raise _lost(rank, error) from error

    def begin_serving(self) -> None:
        """The model is loaded: from now on each collective has only `timeout_s`."""
        self._group._set_default_timeout(self._timeout)

    def sum(self, x: Tensor) -> Tensor:
        """x summed over all ranks, in place; the same bits on each."""
        return self._reduce(x, ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """The largest x of all ranks, in place."""
        return self._reduce(x, ReduceOp.MAX)

    def agree(self, vote: bool, device: torch.device) -> bool:
        """Whether all ranks vote yes."""
        refusals = torch.tensor([not vote], dtype=torch.float32, device=device)
        return not self.max(refusals).item()

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        """The columns of all ranks side by side: [N, own width] -> [N, all widths].

        widths: of each rank
        """
        widest = max(widths)
        padded = x.new_zeros(len(x), widest)
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths]
        self._wait(self._group.allgather([parts], [padded]))
        columns = [part[:, :n] for part, n in zip(parts, widths, strict=True)]
        return torch.cat(columns, 1)

    def _reduce(self, x: Tensor, op: Any) -> Tensor:
        self._wait(self._group.allreduce([x], op))
        return x

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(self.rank, error) from error


def _gloo(
    store: PrefixStore, rank: int, ranks: int, timeout: timedelta, host: str
) -> Any:
    gloo: Any = ProcessGroupGloo  # stubs lack its options
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, ranks, options)


def _nccl(store: PrefixStore, rank: int, ranks: int, timeout: timedelta) -> Any:
    # builds of torch for CPUs have no such class
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, ranks, options)


def _lost(rank: int, error: RuntimeError) -> RanksLostError:
    reason = " ".join(str(error).split())
    return RanksLostError(f"rank {rank} lost the other ranks of its group: {reason}")
