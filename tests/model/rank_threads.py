"""Two ranks of a group in threads of one process, over gloo, whose collectives are noted."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from socket import create_server
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.follower import Follower
from disagg.engine.orders import ArenaOrder, StepOrders, pack_order, unpack_order
from disagg.model.graphs import Recording
from disagg.model.rank_group import RankGroup, join_store, open_store
from disagg.model.runner import Runner

TIMEOUT_S = 30.0

Collective = tuple[str, tuple[int, ...]]  # its name, and the shape that it sends


class NotedCollectives:
    """A process group that notes its collectives. While a step is captured it runs none of them."""

    def __init__(self, process_group: Any):
        self._process_group = process_group
        self.run: list[Collective] = []
        self.captured: list[Collective] | None = None  # None: nothing is

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process_group, name)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        name = "sum" if options.reduceOp == ReduceOp.SUM else "max"
        call = self._process_group.allreduce
        return self._note(name, tensors[0], lambda: call(tensors, options))

    def _allgather_base(self, output: Tensor, part: Tensor, options: Any) -> Any:
        call = self._process_group._allgather_base
        return self._note("gather", part, lambda: call(output, part, options))

    def _note(self, name: str, sent: Tensor, call: Callable[[], Any]) -> Any:
        notes = self.run if self.captured is None else self.captured
        notes.append((name, tuple(sent.shape)))
        return call() if self.captured is None else None


class GraphStandIn:
    """Stands for CUDA graphs of a group: a capture runs no collective, a replay runs its own.

    captures: the collectives of each recorded step
    replays:  of each replay, the number of its step and the collectives that it ran
    broken:   the method that fails, as where memory ran out
    """

    def __init__(self, collectives: NotedCollectives, broken: str = ""):
        self._collectives = collectives
        self._broken = broken
        self.captures: list[list[Collective]] = []
        self.replays: list[tuple[int, list[Collective]]] = []

    def record(self, call: Callable[[], Tensor]) -> Recording:
        raise AssertionError("a group records in steps of its own")

    def warm_up(self, call: Callable[[], Tensor]) -> None:
        self._break("warm_up")
        call()

    def capture(self, call: Callable[[], Tensor]) -> Recording:
        self._break("capture")
        collectives = self._collectives
        collectives.captured = []
        output = call().clone()
        number = len(self.captures)
        self.captures.append(collectives.captured)
        collectives.captured = None

        def replay() -> None:
            begin = len(collectives.run)
            output.copy_(call())
            self.replays.append((number, collectives.run[begin:]))

        return Recording(replay, output.fill_(torch.nan))

    def _break(self, method: str) -> None:
        if method == self._broken:
            raise torch.OutOfMemoryError(f"{method} found no memory")


class RankThread:
    """One rank: its thread, model and collectives."""

    def __init__(self, rank: int, port: int, path: str):
        self._thread = ThreadPoolExecutor(1, f"rank-{rank}")
        self._loading = self._thread.submit(self._load, rank, port, path)

    def _load(self, rank: int, port: int, path: str) -> None:
        store = join_store("127.0.0.1", port)
        group = RankGroup(store, rank, 2, TIMEOUT_S)
        self.collectives = NotedCollectives(group._group)
        group._group = self.collectives
        self.runner = Runner.load(path, group=group)

    def loaded(self) -> "RankThread":
        self._loading.result()
        return self

    def record(self, broken: str = "") -> GraphStandIn:
        """Record steps from now on."""
        recorder = GraphStandIn(self.collectives, broken)
        self.runner.record_steps(recorder)
        self.collectives.run.clear()
        return recorder

    def do(self, call: Callable[[], Any]) -> Any:
        """Begin a call on this rank's thread."""
        return self._thread.submit(call)


class RankThreads:
    """Two ranks with the model at a path, and engines of both."""

    def __init__(self, path: str):
        store = open_store(create_server(("127.0.0.1", 0)))
        ranks = [RankThread(rank, store.port, path) for rank in range(2)]
        self.ranks = [rank.loaded() for rank in ranks]
        self._store = store

    def engine(self, **config: Any) -> Engine:
        """An engine of rank 0, whose orders rank 1 obeys as bytes."""
        _, other = self.ranks
        followers: list[Follower] = []

        def obey(data: bytes) -> None:
            order = unpack_order(data)
            if isinstance(order, ArenaOrder):
                followers.append(Follower(other.runner, order, {}))
            else:
                followers[0].step(order)

        self.obeyed: list[Any] = []

        def send(order: Any) -> None:
            data = pack_order(order)
            self.obeyed.append(other.do(lambda: obey(data)))

        config = {"arena_bytes": 8 << 20, "speculative_tokens": 0, **config}
        runner = self.ranks[0].runner
        return Engine(runner, EngineConfig(**config), orders=StepOrders(send))

    def wait(self) -> None:
        """Return when rank 1 has done all; raises what broke there."""
        for order in self.obeyed:
            order.result(TIMEOUT_S)
