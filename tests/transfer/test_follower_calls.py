"""What rank 0 makes of followers that do not answer."""

import asyncio

import pytest

from disagg.errors import PeerLostError, RanksLostError
from disagg.transfer import follower_calls
from disagg.transfer.follower_calls import FollowerHandler, Followers

CALL_S = 2.0  # until a ping is given up


class Follower(FollowerHandler):
    """Answers pings, or does not: by the clock of its group."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_frozen = False
        self.pings = 0

    async def ping(self) -> None:
        self.pings += 1
        if self.is_frozen:
            self.now += CALL_S
            raise PeerLostError("no answer")

    async def after(self, pings: int) -> None:
        """So many more pings."""
        target = self.pings + pings
        while self.pings < target:
            await asyncio.sleep(0)


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Follower:
    monkeypatch.setattr(follower_calls, "PING_S", 0.0)
    return Follower()


async def test_a_follower_that_answers_nothing_ends_its_group(follower):
    followers = Followers([follower], clock=lambda: follower.now)
    follower.is_frozen = True

    with pytest.raises(RanksLostError, match="rank 1 has not answered for 5 s"):
        await followers.watch(5.0)

    assert follower.now == 4 * CALL_S


async def test_a_freeze_of_rank_0_is_no_silence_of_its_followers(follower):
    """The first ping after it may fail, however long it lasted."""
    followers = Followers([follower], clock=lambda: follower.now)
    watching = asyncio.create_task(followers.watch(5.0))
    await follower.after(3)

    follower.now += 60.0
    follower.is_frozen = True
    await follower.after(1)
    follower.is_frozen = False
    await follower.after(3)

    assert not watching.done()
    watching.cancel()


async def test_a_worker_without_followers_watches_for_ever():
    watching = asyncio.create_task(Followers().watch(0.001))

    await asyncio.sleep(0.01)

    assert not watching.done()
    watching.cancel()
