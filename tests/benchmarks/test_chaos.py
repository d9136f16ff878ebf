"""Streams that go on while workers are killed, frozen, drained and cut off."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from benchmarks.chaos import ChaosOptions, FaultInjector, draw_chaos, measure_chaos
from benchmarks.worker_group import WorkerProcess
from disagg.bench.result import Row

Fault = Callable[[WorkerProcess], Awaitable[None]]


def check(result: Row) -> None:
    """The promises, whatever the faults."""
    assert result["completed_share"] >= 0.95, result["errors"]
    assert result["completed"] > 0
    assert result["wrong"] == result["unequal_tokens"] == 0
    assert not any("died" in error for error in result["errors"])
    assert result["held"] == {}
    assert result["left"] == {"processes": [], "ports": []}


async def inject_each_fault(self: FaultInjector) -> list[Row]:
    """One worker is killed and another frozen at once, then one is drained and one is cut off."""
    rows = list[Row]()

    async def inject(fault: Fault, role: str) -> None:
        workers = self._group.workers.values()
        worker = next(
            x for x in workers if x.role == role and x.name not in self._faulty
        )
        rows.append({"worker": worker.name, "what": fault.__name__[1:]})
        await self._inject(fault, worker)

    async def more_answers() -> None:
        before = self.completed
        while self.completed < before + 4:
            await asyncio.sleep(0.05)

    await more_answers()
    await asyncio.gather(inject(self._kill, "prefill"), inject(self._freeze, "decode"))
    await more_answers()
    while not self._group.router.table.moves:
        await inject(self._drain, "decode")
    await inject(self._cut_off, "decode")
    await more_answers()
    self._over = True
    return rows


@pytest.mark.timeout(600)
def test_four_workers_are_lost_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultInjector, "inject", inject_each_fault)

    result = measure_chaos(ChaosOptions(streams=6, tokens=60))

    check(result)
    assert result["failed"] == 0
    faults = {row["what"] for row in result["rows"]}
    assert faults == {"kill", "freeze", "drain", "cut_off"}
    assert "cut_off" in draw_chaos(result)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [4, 9, 12])
def test_a_minute_of_chaos(seed: int) -> None:
    result = measure_chaos(ChaosOptions(seed=seed, minutes=1.0))

    check(result)
    if any(
        row["what"] == "drain" and "decode" in row["worker"] for row in result["rows"]
    ):
        assert result["moved"]


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
