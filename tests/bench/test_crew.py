"""Streams that go on while workers are killed, frozen, drained and cut off."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from disagg.bench import crew
from disagg.bench.crew import (
    ChaosOptions,
    FaultInjector,
    WorkerProcess,
    draw_chaos,
    measure_chaos,
    measure_moves,
)
from disagg.bench.result import Row

Strike = Callable[[WorkerProcess], Awaitable[None]]


def check(result: Row) -> None:
    """What is promised, however rough it gets."""
    assert result["completed_share"] >= 0.95, result["errors"]
    assert result["completed"] > 0
    assert result["wrong"] == result["unequal_tokens"] == 0
    assert not any("died" in error for error in result["errors"])
    assert result["held"] == {}
    assert result["left"] == {"processes": [], "ports": []}


@pytest.mark.timeout(600)
def test_four_workers_are_lost_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is killed and another frozen at once, then one is drained and one is cut off."""

    async def rage(self: FaultInjector) -> list[Row]:
        done, hands = list[Row](), self._crew.hands

        async def strike(what: Strike, role: str) -> None:
            hand = next(
                x
                for x in hands.values()
                if x.role == role and x.name not in self._struck
            )
            done.append({"worker": hand.name, "what": what.__name__[1:]})
            await self._strike(what, hand)

        async def goes_on() -> None:
            before = self.completed
            while self.completed < before + 4:
                await asyncio.sleep(0.05)

        await goes_on()
        await asyncio.gather(
            strike(self._kill, "prefill"), strike(self._freeze, "decode")
        )
        await goes_on()
        while not self._crew.router.table.moves:
            await strike(self._drain, "decode")
        await strike(self._cut_off, "decode")
        await goes_on()
        self._over = True
        return done

    monkeypatch.setattr(FaultInjector, "rage", rage)
    result = measure_chaos(ChaosOptions(streams=6, tokens=60))
    check(result)
    assert result["failed"] == 0
    assert {row["what"] for row in result["rows"]} == {
        "kill",
        "freeze",
        "drain",
        "cut_off",
    }
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
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.setenv(
            cache, "16"
        )  # of torch's own, which fill up with use: operations.md
    options = ChaosOptions(minutes=1.0, streams=64, calm=True)
    # children have the environment of their first server, which other tests of this process start
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        result = alone.submit(measure_chaos, options).result()
    check(result)
    assert result["failed"] == result["retried"] == 0
    memory = result["resident_mb"]
    assert memory["after"] < 1.1 * memory["before"]


@pytest.mark.slow
def test_every_answer_moves_and_its_bytes_are_the_same_on_both_sides(monkeypatch):
    monkeypatch.setattr(crew, "LENGTHS", (300,))
    for row in measure_moves(rounds=2)["rows"]:
        assert row["moves"] == row["equal"] == 2
        assert 0 < row["moved_bytes"] < 1.1 * row["prefill_bytes"]
        assert (
            min(row["gap_ms"], row["itl_ms"], row["stopped_ms"], row["prefill_ms"]) > 0
        )
