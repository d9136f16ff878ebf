"""Ranks of one host sum in memory: in the order of ranks, and without waiting for the dead."""

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import reduce
from socket import create_server
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    PrefixStore,
    ReduceOp,
)

from disagg.errors import RanksLostError
from disagg.kernels.cpu import meeting
from disagg.model import host_group
from disagg.model.host_group import HALF_BYTES, HostGroup, join_host
from disagg.model.rank_group import RankGroup, join_store, open_store
from disagg.worker.ranks import RankProcesses
from tests.model.tiny import save_tiny

pytestmark = pytest.mark.skipif(
    not meeting.is_served() or sys.platform != "linux",
    reason="needs the C library, on Linux",
)
RANKS = 3
TIMEOUT = timedelta(seconds=20)
JOIN_AND_SLEEP = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import PrefixStore
from disagg.model.host_group import join_host
from disagg.model.rank_group import join_store
store = PrefixStore("cpu", join_store("127.0.0.1", int(sys.argv[1])))
group = join_host(store, 1, 2, timedelta(seconds=20))
print(type(group).__name__, flush=True)
time.sleep(60)
"""


class SlowStore:
    """A store as a rank sees it that is slow to ask for the processes of the others."""

    def __init__(self, store: Any):
        self._store = PrefixStore("cpu", store)

    def get(self, name: str) -> bytes:
        if name.startswith("process"):
            time.sleep(0.2)
        return self._store.get(name)

    def set(self, name: str, value: str) -> None:
        self._store.set(name, value)


def on_all(call: Callable[[int], Any], ranks: int = RANKS) -> list[Any]:
    """What a call returns for each rank, on a thread of its own."""
    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(call, range(ranks))]


def joined(timeout: timedelta = TIMEOUT) -> list[HostGroup | None]:
    store = open_store(create_server(("127.0.0.1", 0)))

    def join(rank: int) -> HostGroup | None:
        own = store if rank == 0 else join_store("127.0.0.1", store.port)
        return join_host(PrefixStore("cpu", own), rank, RANKS, timeout)

    return on_all(join)


@pytest.fixture(scope="module")
def groups() -> list[HostGroup]:
    found = joined()
    assert all(isinstance(group, HostGroup) for group in found)
    return found  # type: ignore[return-value]


def reduced(groups: list[HostGroup], xs: list[Tensor], op: Any) -> list[Tensor]:
    options = AllreduceOptions()
    options.reduceOp = op
    results = [x.clone() for x in xs]
    on_all(lambda rank: groups[rank].allreduce([results[rank]], options))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, HALF_BYTES // 512 + 3])
def test_a_sum_is_that_of_the_ranks_in_order(groups, dtype, rows):
    xs = [torch.randn(rows, 257).to(dtype) for _ in range(RANKS)]
    expected = reduce(torch.add, xs)

    results = reduced(groups, xs, ReduceOp.SUM)

    assert all(torch.equal(result, expected) for result in results)


def test_the_maximum_is_the_largest_of_all(groups):
    xs = [torch.randn(5, 7) for _ in range(RANKS)]

    results = reduced(groups, xs, ReduceOp.MAX)

    assert all(torch.equal(x, torch.stack(xs).amax(0)) for x in results)


@pytest.mark.parametrize("rows", [1, 3000])
def test_parts_are_gathered_in_the_order_of_ranks(groups, rows):
    xs = [torch.randn(rows, 130) for _ in range(RANKS)]
    outputs = [torch.empty(RANKS * rows, 130) for _ in range(RANKS)]

    on_all(
        lambda rank: groups[rank]._allgather_base(
            outputs[rank], xs[rank], AllgatherOptions()
        )
    )

    assert all(torch.equal(output, torch.cat(xs)) for output in outputs)


def test_rank_0_keeps_the_store_while_others_still_read_it():
    stores = [open_store(create_server(("127.0.0.1", 0)))]
    others = SlowStore(join_store("127.0.0.1", stores[0].port))

    def join(rank: int) -> HostGroup | None:
        store = PrefixStore("cpu", stores.pop()) if rank == 0 else others
        return join_host(store, rank, 2, TIMEOUT)  # type: ignore[arg-type]

    assert all(isinstance(group, HostGroup) for group in on_all(join, 2))


def test_many_exchanges_of_any_size_never_mix(groups):
    sizes = torch.randint(1, 5000, (400,), generator=torch.Generator().manual_seed(1))
    options = AllreduceOptions()

    def work(rank: int) -> list[tuple[float, float]]:
        ends = []
        for number, size in enumerate(sizes.tolist()):
            x = torch.full((size,), float(number * (rank + 1)))
            groups[rank].allreduce([x], options)
            ends.append((x.min().item(), x.max().item()))
        return ends

    expected = [(6.0 * number, 6.0 * number) for number in range(len(sizes))]
    assert on_all(work) == [expected] * RANKS


def test_ranks_that_do_not_all_see_the_memory_take_none(monkeypatch):
    opened = host_group._open
    others = iter([lambda store: None, opened])
    monkeypatch.setattr(host_group, "_open", lambda store: next(others)(store))

    assert joined() == [None] * RANKS


def test_without_room_for_it_no_rank_takes_memory(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(host_group.os, "posix_fallocate", refuse)

    assert joined() == [None] * RANKS


def test_without_the_library_no_rank_takes_memory(monkeypatch):
    monkeypatch.setattr(meeting, "is_served", lambda: False)

    assert joined() == [None] * RANKS


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over():
    first, *_ = joined(timedelta(seconds=0.1))

    with pytest.raises(RuntimeError, match=r"rank 1 has not come for 0\.1 s"):
        first.allreduce([torch.ones(3)], AllreduceOptions())


def test_a_rank_that_was_killed_is_named_at_once():
    store = open_store(create_server(("127.0.0.1", 0)))
    with subprocess.Popen(
        [sys.executable, "-c", JOIN_AND_SLEEP, str(store.port)],
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        group = join_host(PrefixStore("cpu", store), 0, 2, timedelta(hours=1))
        assert other.stdout.readline().strip() == "HostGroup"
        other.send_signal(signal.SIGKILL)  # and nobody asks for its exit status

        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            group.allreduce([torch.ones(3)], AllreduceOptions())


def test_the_ranks_of_a_worker_on_one_host_take_memory(tmp_path):
    folder = save_tiny("llama", tmp_path)
    processes = RankProcesses(2, 20.0, str(folder), "float32")
    try:
        assert isinstance(processes.group, RankGroup)
        assert isinstance(processes.group._group, HostGroup)
    finally:
        processes.close()


def test_a_lost_rank_is_an_error_of_the_group(monkeypatch):
    store = open_store(create_server(("127.0.0.1", 0)))

    def join(rank: int) -> RankGroup:
        own = store if rank == 0 else join_store("127.0.0.1", store.port)
        return RankGroup(own, rank, 2, 0.1)

    group, _ = on_all(join, 2)
    group.begin_serving()

    with pytest.raises(RanksLostError, match=r"rank 0 lost the other ranks.*rank 1"):
        group.sum(torch.ones(3))
