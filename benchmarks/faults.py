"""Faults of workers, of their hosts, of the network and of the front end, for `chaos`.

Each is a method of `Faults`:

    kill             SIGKILL; another worker takes its place
    freeze           for 5 s: about as long as a router waits before it takes it for dead
    freeze_for_good  it never answers again; the service kills it after 20 s and starts another one
    hang             its engine never ends its step, while it answers every call: it ends itself
                     after 20 s
    drain            another one takes its place, then it leaves: its sequences move
    cut_off          for 2 to 8 s all its connections break and none is accepted
    few_files        for 2 to 8 s it can open no file and accept no connection
    bad_host         it is killed, and two workers that should replace it cannot start
    kill_door        SIGKILL of a door: its answers end with an error, others do not notice
    kill_router      SIGKILL of the router: doors keep every answer for the next one
    router_cut_off   the router reaches no worker, for longer than it waits for a silent one, while
                     workers reach each other
    upgrade          a worker of each role leaves for one that speaks another version of the wire

Where workers are groups of ranks, these hit rank 0, and three more hit another rank; there is no
`upgrade` then, as other ranks would speak the old version:

    kill_follower    SIGKILL; its group ends itself, and another one takes its place
    freeze_follower  for 5 s: its group waits for it
    freeze_follower_for_good  its group ends itself
"""

import asyncio
import os
import random
import resource
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.front_group import FrontGroup
from benchmarks.worker_group import WorkerProcess, followers_of
from disagg import wire
from disagg.bench.child import Child
from disagg.bench.workers import WorkerEnd
from disagg.config import Config, ModelConfig
from disagg.engine.messages import Abort
from disagg.errors import DisaggError
from disagg.transfer import messages
from disagg.transfer.messages import Role, WorkerInfo
from disagg.worker import watchdog

FREEZE_S = 5.0
SHORT_S = (2.0, 8.0)  # least and most, of faults that pass
RANK_TIMEOUT_S = 20.0  # longer than a freeze that passes
ROUTER_CUT_OFF_S = (1.0, 4.0)  # beyond `router.silence_s`
DRAIN_S = 60.0
REPLACE_S = 20.0  # until a silent worker is replaced, and one that hangs ends itself
END_S = 30.0  # for that end
FILES = 256  # that each process may open
BAD_STARTS = 2
POLL_S = 0.1
SETTLE_S = 0.2  # for broken connections to be closed
MISSING_MODEL = "/no/such/model"


class FaultyWorker(WorkerEnd):
    """A worker that can be made to fail from inside."""

    async def speak(self, version: int) -> None:
        """Another version of the wire; before it starts."""
        control, _ = messages.VERSIONS
        messages.VERSIONS = control, f"wire {version}"
        wire.WIRE_VERSION = version

    async def start(self, config: Config, role: Role, name: str) -> WorkerInfo:
        limit_files(FILES)
        info = await super().start(config, role, name)
        threading.Thread(target=self._end_with_worker, daemon=True).start()
        return info

    def _end_with_worker(self) -> None:
        """A worker that breaks ends its process, as it does in a service."""
        try:
            self._worker.wait()
        except DisaggError:
            os._exit(1)

    async def hang(self) -> None:
        """Its engine never ends the next step."""
        never = threading.Event()
        engine = self._worker.engine
        engine._step = never.wait  # type: ignore[assignment, method-assign]
        engine.submit(Abort("nobody"))  # an idle engine waits for a message

    async def use_up_files(self) -> None:
        """It can open no file from now on."""
        next_file = os.open(os.devnull, os.O_RDONLY)
        os.close(next_file)
        limit_files(next_file)

    async def free_files(self) -> None:
        """It can open files again."""
        limit_files(FILES)


def limit_files(count: int) -> None:
    """Set the soft limit of open files of this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))


@contextmanager
def limited_files() -> Iterator[None]:
    """This process may open FILES files meanwhile."""
    before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit_files(FILES)
    try:
        yield
    finally:
        limit_files(before)


class Faults:
    """What can be done to the processes of a group."""

    def __init__(self, group: FrontGroup, source: random.Random):
        self._group = group
        self._random = source
        self._version = wire.WIRE_VERSION

    # -- of one worker

    async def kill(self, worker: WorkerProcess) -> None:
        await self._end(worker)
        await self._group.start(worker.role)

    async def freeze(self, worker: WorkerProcess) -> None:
        os.kill(worker.child.pid, signal.SIGSTOP)
        await asyncio.sleep(FREEZE_S)
        os.kill(worker.child.pid, signal.SIGCONT)

    async def freeze_for_good(self, worker: WorkerProcess) -> None:
        os.kill(worker.child.pid, signal.SIGSTOP)
        while await self._silent_s(worker) < REPLACE_S:
            await asyncio.sleep(POLL_S)
        await self.kill(worker)

    async def hang(self, worker: WorkerProcess) -> None:
        await asyncio.to_thread(worker.child.ask, "hang")
        exit_code = await asyncio.to_thread(worker.child.wait, REPLACE_S + END_S)
        assert exit_code == watchdog.EXIT_CODE, f"{worker.name} hangs on: {exit_code}"
        await self.kill(worker)

    async def drain(self, worker: WorkerProcess) -> None:
        await self._group.start(worker.role)
        await self._leave(worker)

    async def cut_off(self, worker: WorkerProcess) -> None:
        worker.cut_off()
        await asyncio.sleep(self._random.uniform(*SHORT_S))
        await worker.restore()

    async def few_files(self, worker: WorkerProcess) -> None:
        # connections break first: open ones would go on
        worker.cut_off()
        await asyncio.sleep(SETTLE_S)
        await asyncio.to_thread(worker.child.ask, "use_up_files")
        await worker.restore()
        await asyncio.sleep(self._random.uniform(*SHORT_S))
        await asyncio.to_thread(worker.child.ask, "free_files")

    async def bad_host(self, worker: WorkerProcess) -> None:
        await self._end(worker)
        config = replace(self._group.config, model=ModelConfig(MISSING_MODEL))
        for _ in range(BAD_STARTS):
            try:
                await self._group.start(worker.role, config)
            except DisaggError:
                continue
            raise AssertionError(f"a worker started without {MISSING_MODEL}")
        await self._group.start(worker.role)

    # -- of another rank of a group

    async def kill_follower(self, worker: WorkerProcess) -> None:
        await self._lose_follower(worker, signal.SIGKILL)

    async def freeze_follower(self, worker: WorkerProcess) -> None:
        pid = self._follower(worker)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(FREEZE_S)
        os.kill(pid, signal.SIGCONT)

    async def freeze_follower_for_good(self, worker: WorkerProcess) -> None:
        await self._lose_follower(worker, signal.SIGSTOP)

    async def _lose_follower(self, worker: WorkerProcess, how: signal.Signals) -> None:
        os.kill(self._follower(worker), how)
        exit_code = await asyncio.to_thread(worker.child.wait, RANK_TIMEOUT_S + END_S)
        assert exit_code == 1, f"{worker.name} goes on without a rank: {exit_code}"
        await self.kill(worker)

    def _follower(self, worker: WorkerProcess) -> int:
        return self._random.choice(followers_of(worker.child.pid))

    # -- of a door

    async def kill_door(self, name: str) -> None:
        await self._group.replace_door(name)

    # -- of all

    async def kill_router(self) -> None:
        await self._group.replace_router()

    async def router_cut_off(self) -> None:
        proxies = [worker.router_proxy for worker in self._group.workers.values()]
        for proxy in proxies:
            proxy.close()
        silence_s = self._group.config.router.silence_s
        await asyncio.sleep(silence_s + self._random.uniform(*ROUTER_CUT_OFF_S))
        for proxy in proxies:
            await proxy.open()

    async def upgrade(self) -> None:
        self._version += 1
        self._group.prepare = partial(_speak, version=self._version)
        leaving = []
        for role in (Role.PREFILL, Role.DECODE):
            workers = self._group.workers.values()
            leaving.append(next(worker for worker in workers if worker.role is role))
            await self._group.start(role)
        for worker in leaving:
            await self._leave(worker)

    # -- inside

    async def _end(self, worker: WorkerProcess) -> None:
        """End the process of a worker, and tell the router."""
        if worker.child.wait(0) is None:
            os.kill(worker.child.pid, signal.SIGKILL)
        await self._group.remove(worker)

    async def _silent_s(self, worker: WorkerProcess) -> float:
        """How long the router has not heard of a worker."""
        figures = await self._group.figures()
        return figures.silent_s.get(worker.name, 0.0)

    async def _leave(self, worker: WorkerProcess) -> None:
        await asyncio.to_thread(worker.child.ask, "leave", DRAIN_S)
        await self._group.remove(worker)


def _speak(child: Child, version: int) -> None:
    child.ask("speak", version)


WORKER_FAULTS: dict[str, Callable[[Faults, WorkerProcess], Awaitable[Any]]] = {
    "kill": Faults.kill,
    "freeze": Faults.freeze,
    "freeze_for_good": Faults.freeze_for_good,
    "hang": Faults.hang,
    "drain": Faults.drain,
    "cut_off": Faults.cut_off,
    "few_files": Faults.few_files,
    "bad_host": Faults.bad_host,
}
RANK_FAULTS: dict[str, Callable[[Faults, WorkerProcess], Awaitable[Any]]] = {
    "kill_follower": Faults.kill_follower,
    "freeze_follower": Faults.freeze_follower,
    "freeze_follower_for_good": Faults.freeze_follower_for_good,
}
DOOR_FAULTS: dict[str, Callable[[Faults, str], Awaitable[Any]]] = {
    "kill_door": Faults.kill_door,
}
GROUP_FAULTS: dict[str, Callable[[Faults], Awaitable[Any]]] = {
    "kill_router": Faults.kill_router,
    "router_cut_off": Faults.router_cut_off,
    "upgrade": Faults.upgrade,
}
ALL_FAULTS = (*WORKER_FAULTS, *DOOR_FAULTS, *GROUP_FAULTS)
FAULTS_OF_RANKS = (*(x for x in ALL_FAULTS if x != "upgrade"), *RANK_FAULTS)
