"""Streams that go on while workers, hosts and the network fail."""

import asyncio
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from benchmarks import faults
from benchmarks.chaos import ChaosOptions, FaultInjector, draw_chaos, measure_chaos
from disagg.bench.result import Row
from disagg.transfer.messages import Role


def check(result: Row) -> None:
    """The promises, whatever the faults."""
    assert result["completed_share"] >= 0.95, result["errors"]
    assert result["completed"] > 0
    assert result["wrong"] == result["unequal_tokens"] == 0
    assert not any("died" in error for error in result["errors"])
    assert result["held"] == {}
    assert result["left"] == {"processes": [], "ports": []}


class Script(FaultInjector):
    """Faults that a test chooses."""

    def begin(self) -> None:
        self.rows = list[Row]()

    async def hit(self, fault: str, role: Role) -> None:
        """Inject a fault at a worker of a role that has none."""
        workers = self._group.workers.items()
        name = next(
            name
            for name, worker in workers
            if worker.role is role and name not in self._faulty
        )
        await self.hit_at(name, fault)

    async def hit_at(self, name: str, fault: str) -> None:
        self.rows.append({"victim": name, "what": fault})
        await self._inject(fault, name)

    async def more_answers(self) -> None:
        answers = self._group.answers
        before = answers.completed
        while answers.completed < before + 4:
            await asyncio.sleep(0.05)

    async def moves(self) -> int:
        return (await self._group.figures()).counts["moved"]


async def lose_four_workers(self: Script) -> list[Row]:
    """One worker is killed and another frozen at once, then one is drained and one is cut off."""
    self.begin()
    await self.more_answers()
    await asyncio.gather(
        self.hit("kill", Role.PREFILL), self.hit("freeze", Role.DECODE)
    )
    await self.more_answers()
    while not await self.moves():
        await self.hit("drain", Role.DECODE)
    await self.hit("cut_off", Role.DECODE)
    await self.more_answers()
    return self.rows


async def lose_hosts_and_the_network(self: Script) -> list[Row]:
    """Workers that stand still for good and start badly; files and the router's network end."""
    self.begin()
    await self.more_answers()
    await asyncio.gather(
        self.hit("freeze_for_good", Role.PREFILL), self.hit("hang", Role.DECODE)
    )
    await self.more_answers()
    await asyncio.gather(
        self.hit("few_files", Role.DECODE), self.hit("bad_host", Role.PREFILL)
    )
    await self.hit_at("all", "router_cut_off")
    await self.more_answers()
    return self.rows


async def lose_the_front_end(self: Script) -> list[Row]:
    """The router is killed, and a door."""
    self.begin()
    await self.more_answers()
    await self.hit_at("all", "kill_router")
    await self.more_answers()
    await self.hit_at("door-0", "kill_door")
    await self.more_answers()
    return self.rows


async def lose_followers(self: Script) -> list[Row]:
    """One is killed, one stands still for good, one for a moment; then a group is drained."""
    self.begin()
    await self.more_answers()
    await asyncio.gather(
        self.hit("kill_follower", Role.PREFILL),
        self.hit("freeze_follower_for_good", Role.DECODE),
    )
    await self.more_answers()
    await self.hit("freeze_follower", Role.DECODE)
    while not await self.moves():
        await self.hit("drain", Role.DECODE)
    await self.more_answers()
    return self.rows


def measure(monkeypatch: pytest.MonkeyPatch, script: object, **options: object) -> Row:
    monkeypatch.setattr("benchmarks.chaos.FaultInjector", Script)
    monkeypatch.setattr(Script, "inject", script)
    return measure_chaos(ChaosOptions(streams=6, tokens=60, **options))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_workers_are_lost_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure(monkeypatch, lose_four_workers)

    check(result)
    assert result["failed"] == 0
    names = {row["what"] for row in result["rows"]}
    assert names == {"kill", "freeze", "drain", "cut_off"}
    assert "cut_off" in draw_chaos(result)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hosts_and_the_network_are_lost_and_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "REPLACE_S", 7.0)  # longer than a router waits

    result = measure(monkeypatch, lose_hosts_and_the_network)

    check(result)
    assert result["failed"] == 0
    assert len(result["rows"]) == 5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_router_costs_no_answer_and_a_door_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = measure(monkeypatch, lose_the_front_end)

    check(result)
    assert result["failed"] == 0
    assert result["cut"] == 3  # half of the streams


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_followers_are_lost_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"prefill_ranks": 2, "decode_ranks": 2, "codec": "raw"}

    result = measure(monkeypatch, lose_followers, **groups)

    check(result)
    assert result["failed"] == 0
    assert result["moved"] > 0


def test_an_unknown_fault_is_refused(disagg) -> None:
    output = disagg("bench chaos --fault flood", code=2)

    assert "unknown fault 'flood'; known: bad_host, cut_off" in output.err


def test_every_fault_is_described() -> None:
    described = re.findall(r"^    (\w+)  ", str(faults.__doc__), re.M)

    assert described == [*faults.ALL_FAULTS, *faults.RANK_FAULTS]


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [4, 9, 12])
def test_a_minute_of_chaos(seed: int) -> None:
    result = measure_chaos(ChaosOptions(seed=seed, minutes=1.0))

    check(result)
    if any(
        row["what"] == "drain" and "decode" in row["victim"] for row in result["rows"]
    ):
        assert result["moved"]


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_minute_of_chaos_of_groups() -> None:
    groups = {"prefill_ranks": 2, "decode_ranks": 2, "codec": "raw"}

    check(measure_chaos(ChaosOptions(seed=7, minutes=1.0, streams=16, **groups)))


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_calm_minute_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own caches, which fill up with use: operations.md
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(cache, "16")
    options = ChaosOptions(minutes=1.0, streams=64, calm=True)

    # children have the environment of their first server, which other tests of this process start
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        result = alone.submit(measure_chaos, options).result()

    check(result)
    assert result["failed"] == result["retried"] == 0
    memory = result["resident_mb"]
    assert memory["after"] < 1.1 * memory["before"]
