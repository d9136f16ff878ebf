import asyncio
from collections.abc import Sequence
from itertools import count

import pytest

from disagg.errors import ConfigError, PeerLostError
from disagg.transfer.channel import connect
from disagg.transfer.probe import FIRST_BYTES, measure
from disagg.transfer.security import Security
from disagg.transfer.streams import StreamCall
from disagg.wire import FRAME_BYTES, Buffer
from tests.transfer.wires import open_house


def test_a_link_is_measured_over_the_calls_of_hand_offs_and_leaves_nothing():
    async def scene():
        async with open_house() as house:
            report = await measure(house.link)
            assert report.peer == house.address
            assert report.round_trip_ms > 0
            assert report.gbytes_per_s > 0
            assert str(report).startswith(f"link to {house.address}: ")
            assert "gRPC over TCP" in str(report)
            house.assert_nothing_held()

    asyncio.run(scene())


def test_the_figures_are_those_of_the_clock():
    """Every call takes 10 ms: a round trip of 10 ms, and the largest frame in about as much."""

    async def scene():
        async with open_house() as house:
            ticks = count()
            report = await measure(house.link, clock=lambda: 0.010 * next(ticks))
            assert report.round_trip_ms == pytest.approx(10.0)
            assert report.gbytes_per_s == pytest.approx(FRAME_BYTES / 0.005 / 1e9)

    asyncio.run(scene())


def test_a_slow_link_is_not_kept_busy_for_long(monkeypatch):
    """A clock on which bytes are slow: 1 ms for each KiB of what crosses."""

    async def scene():
        async with open_house() as house:
            sent: list[int] = []
            send = StreamCall.send

            async def slow(call: StreamCall, parts: Sequence[Buffer], size: int) -> bool:
                sent.append(size)
                return await send(call, parts, size)

            monkeypatch.setattr(StreamCall, "send", slow)
            report = await measure(house.link, clock=lambda: sum(sent) / 1024 * 1e-3)
            assert max(sent) < 1.01 * FIRST_BYTES
            assert report.gbytes_per_s == pytest.approx(1024e3 / 1e9, rel=0.01)

    asyncio.run(scene())


def test_who_cannot_be_measured_is_a_typed_error():
    async def scene():
        link = connect("127.0.0.1:1")
        with pytest.raises(PeerLostError):
            await measure(link)
        await link.close()
        async with open_house(security=Security(token="a"), client=Security(token="b")) as house:
            with pytest.raises(ConfigError):
                await measure(house.link)

    asyncio.run(scene())
