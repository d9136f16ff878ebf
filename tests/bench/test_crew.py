"""Streams that go on while workers are killed, frozen, drained and cut off."""

import asyncio

import pytest

from disagg.bench.crew import ChaosOptions, Door, Storm, draw_chaos, measure_chaos
from disagg.bench.result import Row


def check(result: Row) -> None:
    """What is promised, however rough it gets."""
    assert result["completed_share"] >= 0.95, result["errors"]
    assert result["completed"] > 0
    assert result["wrong"] == result["unequal_tokens"] == 0
    assert not any("died" in error for error in result["errors"])
    assert result["held"] == {}
    assert result["left"] == {"processes": [], "ports": []}


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_three_workers_are_lost_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker is killed, the decode worker drained, its successor cut off."""

    async def rage(self: Storm) -> list[Row]:
        done = list[Row]()
        for strike, role in (
            (self._kill, "prefill"),
            (self._drain, "decode"),
            (self._cut_off, "decode"),
        ):
            (hand,) = [x for x in self._crew.hands.values() if x.role == role]
            before = self.outcome.completed
            await strike(hand)
            done.append({"worker": hand.name, "what": strike.__name__[1:]})
            while self.outcome.completed < before + 2:
                await asyncio.sleep(0.05)
        self._over = True
        return done

    monkeypatch.setattr(Storm, "rage", rage)
    result = measure_chaos(ChaosOptions(prefill=1, decode=1, streams=4, tokens=60))
    check(result)
    assert result["failed"] == 0
    assert [row["what"] for row in result["rows"]] == ["kill", "drain", "cut_off"]
    assert "cut_off" in draw_chaos(result)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_minute_of_chaos() -> None:
    check(measure_chaos(ChaosOptions(seed=4, minutes=1.0)))


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_calm_minute_leaves_nothing_behind() -> None:
    result = measure_chaos(ChaosOptions(minutes=1.0, streams=64, calm=True))
    check(result)
    assert result["failed"] == result["retried"] == 0
    memory = result["resident_mb"]
    assert memory["after"] < 1.1 * memory["before"]


def test_a_door_that_is_shut_breaks_what_is_through_and_opens_again() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    async def scene() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        door = Door(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        host, _, port = (await door.open()).rpartition(":")
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            door.shut()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(host, int(port))
            writer.close()
            assert (await door.open()) == f"{host}:{port}"
        door.shut()
        server.close()

    asyncio.run(scene())
