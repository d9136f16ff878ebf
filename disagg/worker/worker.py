"""A worker: one engine thread that computes, one io thread that talks. Plain Python, no Ray.

    main thread     start, stop, wait
    engine thread   the only one that runs the model: engine.run(deliver)
    watchdog        ends the process if a step of the engine never ends
    io thread       one asyncio loop: gRPC server and clients; `WorkerService` lives here
    between them    engine.submit(message)  and  loop.call_soon_threadsafe(StepOutput)

All tasks of the io thread are in one group: if one ends early, the worker ends and is replaced.
"""

import asyncio
import atexit
import gc
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from disagg.config import Config
from disagg.engine.arena import check_slabs
from disagg.engine.engine import Engine
from disagg.engine.messages import Drain
from disagg.engine.warm import warm_up
from disagg.errors import (
    CapacityError,
    PeerLostError,
    RanksLostError,
)
from disagg.model.capacity import check_ranks_of
from disagg.model.runner import Runner
from disagg.paged.doctor import check_plans
from disagg.transfer.control import worker_handler
from disagg.transfer.direct import DirectServer
from disagg.transfer.follower_calls import FollowerClient, Followers
from disagg.transfer.messages import (
    Role,
    WorkerInfo,
)
from disagg.transfer.rpc import connect, start_server, tune_malloc
from disagg.transfer.security import Security
from disagg.worker.child_ranks import ChildRanks
from disagg.worker.rank_endpoint import ServeOrder
from disagg.worker.rank_start import RankStarter
from disagg.worker.ranks import RankProcesses
from disagg.worker.service import WorkerService, backend_of
from disagg.worker.watchdog import Watchdog, end_process

POLL_S = 0.02
# between two checks that a router follows: each takes the interpreter from the engine
CHECK_S = 0.25
# a worker that no router has ever followed waits at least this long
FIRST_ROUTER_S = 60.0

log = logging.getLogger(__name__)


class Worker:
    """One model, one engine and their two threads. `start` it, `stop` it.

    service: what its router calls, once started
    doing:   what delays its start, in words
    """

    service: WorkerService

    def __init__(
        self,
        config: Config,
        role: Role,
        name: str,
        host: str = "127.0.0.1",
        security: Security | None = None,
        runner: Runner | None = None,
        processes: int = 1,
        starter: RankStarter | None = None,
    ):
        """
        processes: of this host that load the model
        starter:   of its other ranks; None: they are child processes
        """
        self.config = config
        self._initial_role = role
        self.name = name
        self.doing = ""
        self._host = host
        self._security = security
        ranks = config.cluster.ranks_of(role)
        processes = max(processes, ranks)
        self._ranks: RankProcesses | None = None
        if ranks > 1:
            starter = starter or ChildRanks(host, security, config.cluster.ports)
            self._ranks = self._start_ranks(ranks, processes, starter)
        with self._ranks.loading() if self._ranks else nullcontext():
            self._load(runner, processes)
        self._info: Future[WorkerInfo] = Future()
        self._io_thread = threading.Thread(
            target=self._run_io, name=f"{name}-io", daemon=True
        )
        self._engine_thread = threading.Thread(
            target=self._run_engine, name=f"{name}-engine", daemon=True
        )
        self._watchdog = Watchdog(
            name, self.engine.progress, config.engine.stuck_s, self._end_stuck
        )
        self._failure: BaseException | None = None

    def _load(self, runner: Runner | None, processes: int) -> None:
        """The model, the engine, and the addresses of the other ranks, which load beside it."""
        config = self.config
        model = config.model
        self._runner = runner or Runner.load(
            model.name,
            model.dtype,
            model.device,
            model.context,
            processes,
            model.weights,
            group=self._ranks.group if self._ranks else None,
        )
        self._listed = config.listed
        compiled = self._listed if self._runner.graphs else ()
        self.engine = Engine(
            self._runner,
            config.engine,
            codecs=compiled,
            probed=self._listed,
            state=config.state,
            expected=self._listed,
            orders=self._ranks.orders() if self._ranks else None,
        )
        check_slabs(
            self.engine.pool.arena.nbytes,
            self.engine.pool.slab_bytes,
            map(self.engine.plan, self._listed),
            self._runner.info.context_length,
        )
        self._followers = self._serve_followers()  # addresses

    def _start_ranks(
        self, ranks: int, processes: int, starter: RankStarter
    ) -> RankProcesses:
        """The other ranks of this worker, which load beside it."""
        model = self.config.model
        check_ranks_of(model.name, ranks)
        return RankProcesses(
            ranks,
            self.config.cluster.rank_timeout_s,
            model.name,
            model.dtype,
            model.device,
            model.context,
            processes,
            self.config.engine.torch_threads,
            starter,
        )

    def _serve_followers(self) -> list[str]:
        """Let the other ranks take and send their parts of hand-offs; their addresses."""
        if self._ranks is None:
            return []
        order = ServeOrder(
            model=self._runner.fingerprint,
            transfer=self.config.transfer,
            ports=self.config.cluster.ports,
        )
        return self._ranks.serve(order)

    def _on_rank_lost(self, error: RanksLostError) -> None:
        """A rank has ended: so does the worker, as if its process had."""
        self._break(error)
        if self._info.done():  # else `start` looks
            self._on_loop(self._begin_stop, 0.0)

    def _break(self, error: BaseException) -> None:
        """Note why the worker ends. A frozen follower would outlive this process."""
        self._failure = self._failure or error
        if self._ranks is not None:
            self._ranks.kill()

    def _end_stuck(self) -> None:
        """End this process, whose engine stands still, and those of its followers."""
        if self._ranks is not None:
            self._ranks.kill()
        end_process()

    # -- from any thread

    def start(self) -> WorkerInfo:
        """Serve; returns when it can be reached.

        ConfigError if its codec does not fit, or is not sound on its GPU; RanksLostError if another
        rank ends meanwhile.
        """
        backend = backend_of(self._runner)
        has_no_library = backend.startswith("torch")
        level = logging.WARNING if has_no_library else logging.INFO
        runner = self._runner
        dtype = runner.info.dtype
        if self.config.model.weights is not None:
            dtype = f"{dtype}, weights {runner.weights}"
        log.log(level, "%s: %s, computes in %s", self.name, backend, dtype)
        if self._ranks is not None:
            self._ranks.watch(self._on_rank_lost)
        with self._ranks.loading() if self._ranks else nullcontext():
            self._warm_up()
        self._io_thread.start()
        self._info.result()
        self._engine_thread.start()
        self._watchdog.start()
        if self._failure is not None:
            self._on_loop(self._begin_stop, 0.0)
        return self.info

    def _warm_up(self) -> None:
        """On a GPU, compile and record what steps need."""
        if not self._runner.graphs:
            return
        query_heads = self._runner.info.query_heads
        check_plans(list(self.engine.listed), query_heads, self._runner.device)
        warm_up(
            self.engine,
            self._runner,
            self._listed,
            self.engine.decode_slots.count,
            report=partial(setattr, self, "doing"),
        )
        if self._ranks is not None:
            self._ranks.begin_serving()

    @property
    def info(self) -> WorkerInfo:
        """How it can be reached, with its epoch and role of now."""
        info = self._info.result()
        return replace(info, epoch=self.service.epoch, role=self.service.role)

    def assume(self, role: Role) -> None:
        """Change the role. Requests that run here go on, until the router moves them."""
        self._on_loop(self.service.assume, role)

    def stop(self, grace_s: float | None = None) -> None:
        """Take nothing new, finish or move what runs here within the grace, then end."""
        if grace_s is None:
            grace_s = self.config.cluster.grace_s
        self._on_loop(self._begin_stop, grace_s)

    def wait_alone(self, timeout_s: float) -> bool:
        """Wait until no router follows; False if one still does in the end."""
        until = time.monotonic() + timeout_s
        while self.service.event_log.is_followed:
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        return True

    def meet(self, addresses: list[str]) -> list[str]:
        """Connect to decode workers and measure the links; what each can do, in words."""
        meeting = self.service.peers.meet(addresses)
        return asyncio.run_coroutine_threadsafe(meeting, self._loop).result()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended (True). Raises the error that broke it, if any."""
        threads = [self._io_thread, self._engine_thread]
        for thread in threads:
            thread.join(timeout_s)
            if self._failure is not None:
                raise self._failure
        return not any(thread.is_alive() for thread in threads)

    # -- threads

    def _run_engine(self) -> None:
        """The only thread with a team of OpenMP: beside another team it would not spin."""
        try:
            if self.config.engine.torch_threads is not None:
                torch.set_num_threads(self.config.engine.torch_threads)
            self.engine.run(lambda output: self._on_loop(self.service.on_step, output))
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._watchdog.stop()
            if self._ranks is not None:
                self._runner.leave_group()
                self._ranks.close()
            self._on_loop(self._begin_stop, 0.0)

    def _run_io(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):  # the first one is reported
                error = error.exceptions[0]
            self._break(error)
            if self._info.done():
                self.engine.submit(Drain())
                raise
            self._info.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_asked: asyncio.Future[float] = self._loop.create_future()
        links = [connect(address, self._security) for address in self._followers]
        async with asyncio.TaskGroup() as tasks:
            followers = Followers([*map(FollowerClient, links)], self._followers)
            self.service = self._make_service(tasks, followers)
            endless = [
                self.service.receiver.run(),
                self._watch_router(),
                followers.watch(self.config.cluster.rank_timeout_s),
                *self._make_direct(),
            ]
            endless_tasks = [tasks.create_task(self._supervise(x)) for x in endless]
            server, address = await start_server(
                [worker_handler(self.service), self.service.receiver.handlers()],
                self._host,
                self._security,
                self.config.cluster.ports,
            )
            self._info.set_result(self.service.info(address))
            try:
                await self._drain(await self._stop_asked)
            finally:
                for task in endless_tasks:
                    task.cancel()
                await server.stop(0)
                await self.service.peers.close()
                for link in links:
                    await link.close()
        await asyncio.to_thread(self._engine_thread.join)

    async def _supervise(self, work: Coroutine[Any, Any, None]) -> None:
        await work
        raise RuntimeError(f"a part of {self.name} that never ends has ended: {work}")

    def _make_service(
        self, tasks: asyncio.TaskGroup, followers: Followers
    ) -> WorkerService:
        return WorkerService(
            name=self.name,
            role=self._initial_role,
            config=self.config,
            engine=self.engine,
            runner=self._runner,
            security=self._security,
            tasks=tasks,
            followers=followers,
            rank_pids=self._ranks.pids if self._ranks else (),
            host=self._host,
        )

    def _make_direct(self) -> list[Coroutine[Any, Any, None]]:
        """The server of direct connections, if the settings ask for one."""
        if self.config.transfer.channel != "direct":
            return []
        direct = DirectServer(self.service.receiver, self._security)
        direct.listen(self._host, self.config.cluster.ports)
        return [direct.run()]

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    # -- the end

    async def _watch_router(self) -> None:
        """Without a router for a lease, free everything; for longer, stop."""
        lease_s = self.config.transfer.lease_s
        followed_at = self._loop.time()
        while True:
            await asyncio.sleep(CHECK_S)
            if self.service.event_log.is_followed:
                followed_at = self._loop.time()
                continue
            alone_s = self._loop.time() - followed_at
            orphan_s = self.config.cluster.orphan_s
            if not self.service.event_log.router:
                orphan_s = max(FIRST_ROUTER_S, orphan_s)
            elif alone_s >= lease_s:
                error = PeerLostError("no router listened for longer than a lease")
                await self.service.give_up(error)
            if alone_s >= orphan_s:
                self._begin_stop(0.0)

    def _begin_stop(self, grace_s: float) -> None:
        if not self._stop_asked.done():
            self._stop_asked.set_result(grace_s)

    async def _drain(self, grace_s: float) -> None:
        """Let requests end or move, then drop the rest; the engine's thread ends last."""
        if self._failure is None:  # else it dies, and does not leave
            self.service.assume(Role.NONE)
        until = self._loop.time() + grace_s
        while self._loop.time() < until and self.service.is_busy():
            await asyncio.sleep(POLL_S)
        if self._failure is None:
            error = CapacityError(f"{self.name} leaves, and had no time for it")
            await self.service.give_up(error)
            # until the router has these events: else it would wait for other workers' reports
            await asyncio.sleep(POLL_S)
        await self.service.drop_all("the worker stops")
        self.engine.submit(Drain())


def settle_memory() -> None:
    """Keep what was loaded: glibc keeps large buffers, the garbage collector skips old objects.

    A full collection of the objects of torch and transformers stops every thread for 0.2 s, in the
    middle of a decode step.
    """
    tune_malloc()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries expect a collection at the end
