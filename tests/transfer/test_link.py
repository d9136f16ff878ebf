"""What a link can do, by the clock; and a token bucket by numbers."""

from itertools import count
from unittest.mock import AsyncMock

import pytest

from disagg.config import TransferConfig
from disagg.errors import ConfigError, PeerLostError, VersionError
from disagg.transfer import channel
from disagg.transfer.channel import Channel, Peers
from disagg.transfer.link import (
    FIRST_BYTES,
    LEAST_FRAME_BYTES,
    SHORT_BYTES,
    LinkReport,
    RateLimiter,
    RateMeter,
    measure,
)
from disagg.transfer.rpc import start_server
from disagg.transfer.security import Security
from disagg.wire import FRAME_BYTES, frame_message
from tests.transfer.peer import open_peer


async def test_a_link_is_measured_by_the_clock_over_calls_of_hand_offs():
    """Every call takes 10 ms: a round trip of 10 ms, and the largest frame in about as much."""
    ticks = count()
    async with open_peer() as (peer, channel):
        report = await measure(channel.link, clock=lambda: 0.010 * next(ticks))
        assert report.round_trip_ms == pytest.approx(10.0)
        assert report.gbytes_per_s == pytest.approx(FRAME_BYTES / 0.005 / 1e9)
        assert report.peer == peer.address
        assert str(report).startswith(f"link to {peer.address}: ")
        assert "gRPC over TCP" in str(report)


def test_a_rate_counts_only_the_time_with_frames_in_flight():
    meter = RateMeter()
    assert meter.read() == 0
    meter.leaves(400, 1.0)
    meter.leaves(600, 1.5)  # a second frame behind the first
    meter.arrived(2.0)
    meter.arrived(3.0)
    meter.leaves(500, 9.0)  # after a pause
    meter.arrived(10.0)
    assert meter.read() == 500
    assert meter.read() == 500, "nothing came since"
    meter.leaves(7, 20.0)
    meter.arrived(21.0)
    assert meter.read() == 7


async def test_a_slow_link_is_not_kept_busy_for_long(monkeypatch):
    """A clock on which bytes are slow: 1 ms for each KiB of what crosses."""
    sent: list[int] = []

    def note(parts: list[bytes]) -> bytes:
        sent.append(len(parts[0]))
        return frame_message(parts)

    monkeypatch.setattr("disagg.transfer.link.frame_message", note)

    async with open_peer() as (_, channel):
        calls = count()

        def clock() -> float:  # asked before and after each message
            done = next(calls) % 2
            return sum(sent[: len(sent) if done else -1]) / 1024 * 1e-3

        report = await measure(channel.link, clock)
        assert max(sent) < 1.01 * FIRST_BYTES
        assert report.gbytes_per_s == pytest.approx(1024e3 / 1e9, rel=0.01)


async def test_who_cannot_be_measured_is_a_typed_error():
    nobody = Channel("127.0.0.1:1")
    with pytest.raises(PeerLostError):
        await measure(nobody.link)
    await nobody.close()
    async with open_peer(security=Security(token="a"), client=Security(token="b")) as (
        _,
        one,
    ):
        with pytest.raises(ConfigError):
            await measure(one.link)
    server, address = await start_server([], "127.0.0.1")
    other = Channel(address)
    with pytest.raises(VersionError):
        await measure(other.link)
    await other.close()
    await server.stop(None)


async def test_peers_are_measured_in_advance_if_they_can_be():
    async with open_peer() as (peer, _):
        peers = Peers(None, TransferConfig())
        (words,) = await peers.meet([peer.address, "127.0.0.1:1"])
        assert words.startswith(f"link to {peer.address}")
        assert [each["peer"] for each in peers.as_info()] == [peer.address]
        await peers.close()


def test_a_burst_passes_at_once_and_the_rest_at_the_rate():
    pace = RateLimiter(1000.0, burst_bytes=500)
    requests = ((500, 0.0), (100, 0.0), (100, 0.1), (500, 100.0), (100, 100.0))
    assert [pace.delay(*request) for request in requests] == [0.0, 0.1, 0.1, 0.0, 0.1]


def test_over_time_the_rate_is_exact_whatever_the_messages():
    pace, now, sent = RateLimiter(1000.0, burst_bytes=64), 0.0, 0
    for nbytes in (7, 2000, 1, 64, 500, 33) * 20:
        now += pace.delay(nbytes, now)
        sent += nbytes
    assert abs(now - (sent - 64) / 1000.0) < 1e-6


async def test_frames_over_a_slow_link_are_small(
    monkeypatch,
):
    report = LinkReport("127.0.0.1:1", "a modem", 90.0, 35e-6)
    monkeypatch.setattr(channel, "measure", AsyncMock(return_value=report))
    peers = Peers(None, TransferConfig())

    await peers.meet(["127.0.0.1:1"])

    assert peers.get("127.0.0.1:1").frame_bytes == 14_000
    await peers.close()


@pytest.mark.parametrize(
    ("gbytes_per_s", "expected"),
    [
        (1e-9, LEAST_FRAME_BYTES),
        (35e-6, 14_000),
        (1.0, FRAME_BYTES),
    ],
)
def test_a_frame_takes_the_time_of_a_ping_at_most(gbytes_per_s, expected):
    assert LinkReport("", "", 1.0, gbytes_per_s).frame_bytes(FRAME_BYTES) == expected


async def test_the_next_service_measures_no_link_again(monkeypatch):
    report = LinkReport("127.0.0.1:1", "a modem", 90.0, 35e-6)
    measure = AsyncMock(return_value=report)
    monkeypatch.setattr(channel, "measure", measure)
    monkeypatch.setattr(channel, "reach", AsyncMock())
    peers = Peers(None, TransferConfig())

    lines = [await peers.meet(["127.0.0.1:1", "127.0.0.1:2"]) for _ in range(2)]

    assert measure.await_count == 1
    assert lines[0] == lines[1]
    assert [line.split(":")[1] for line in lines[0]] == ["1", "2"]
    await peers.close()


async def test_a_short_probe_sends_little(monkeypatch):
    sent: list[int] = []

    def note(parts: list[bytes]) -> bytes:
        sent.append(len(parts[0]))
        return frame_message(parts)

    monkeypatch.setattr("disagg.transfer.link.frame_message", note)
    async with open_peer() as (_, link_channel):
        report = await measure(link_channel.link, is_short=True)

    assert sum(sent) == SHORT_BYTES
    assert report.gbytes_per_s > 0
