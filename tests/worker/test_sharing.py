"""Two real prompts with a common beginning, through two workers."""

import threading
from typing import Any

import pytest

from disagg.config import Config, TransferConfig
from disagg.errors import TransferError
from disagg.kv.page import ARENA_UNIT, RAW_TOKENS, Item, Kind
from disagg.transfer import receiver
from disagg.transfer.records import Manifest
from disagg.transfer.sender import Sender, SendQueue
from disagg.worker.handoff import OutgoingHandoff
from disagg.worker.worker import Worker
from tests.transfer.prompts import shared_bytes
from tests.worker.pairs import KIVI, alone, on_loop, paired

SHARED = 1000


@pytest.mark.parametrize(
    "codec",
    [
        KIVI,
        "raw",
        "0-1:kivi:bits=4;2-:kivi:bits=2,residual=32",
        "banded",
        f"{KIVI},sink=64",
    ],
)
async def test_no_page_in_the_shared_part_of_a_second_prompt_is_sent_again(
    codec, home, story
):
    beginning = (story * 6)[:SHARED]
    first, second = beginning + story[40:130], beginning + story[7:190]
    _, one = await home.complete(first, codec)
    tokens, two = await home.complete(second, codec)
    manifest = Manifest(home.workers["d"].engine.plan(codec), len(second))
    shared = shared_bytes(manifest, SHARED)
    assert one.kv["cached_bytes"] == 0
    assert two.kv["cached_bytes"] == shared > manifest.total_bytes / 3
    assert two.kv["wire_bytes"] < 1.05 * (manifest.total_bytes - shared) + 20_000
    await home.empty()
    assert home.seen["d"]["cached_pages"] > 0  # later a scrub may own some
    assert tokens == alone(second, codec)


@pytest.fixture
def scrubs_are_asked_for(monkeypatch):
    """A worker's own, at the same time, would count the same damage again."""
    monkeypatch.setattr(receiver, "TURN_S", 60.0)


@pytest.mark.usefixtures("scrubs_are_asked_for")
async def test_an_answer_whose_pages_are_altered_is_computed_again_from_whole_ones(
    home, story
):
    """The router hears of the damage, and the next attempt replays what the client has."""
    expected, _ = await home.complete(story, KIVI, max_tokens=150)
    asking, decode = (
        await home.begin(story, KIVI, heard=5, max_tokens=150),
        home.workers["d"],
    )
    await on_loop(decode, alter_and_scrub(decode))
    assert (await asking)[0] == expected
    assert decode.service.receiver.reservations.counts["damaged"] == 1
    assert home.router.table.retries == 1


async def alter_and_scrub(worker: Worker) -> None:
    """Flip a bit of a code of a page in the last layer: few tokens would change."""
    pool = worker.engine.pool
    (cached_page,) = pool.take(pool.kept_keys()[:1])
    place = cached_page.pages[0] * ARENA_UNIT + 4097
    (byte,) = pool.arena.read(place, 1)
    pool.arena.write([(place, bytes([byte ^ 1]))])
    pool.release(cached_page.pages)
    await worker.service.receiver.scrub(1 << 30)


async def test_sharing_can_be_turned_off(runners, story):
    async with paired(runners, Config(transfer=TransferConfig(dedup=False))) as home:
        for _ in range(2):
            _, last = await home.complete(story, KIVI)
            assert last.kv["cached_bytes"] == 0
        assert (await home.gauges())["d"]["cached_pages"] == 0


async def test_a_prompt_that_comes_again_is_computed_once_and_both_sides_count_it(
    home, story
):
    (first, one), (second, two) = [await home.complete(story, KIVI) for _ in range(2)]
    assert first == second
    cached_tokens = (len(story) - 1) // RAW_TOKENS * RAW_TOKENS
    assert (one.kv["cached_tokens"], two.kv["cached_tokens"]) == (0, cached_tokens)
    status = await home.router.status()
    prefill, decode = (status[name].info["counts"] for name in ("p", "d"))
    assert prefill["computed_tokens"] == 2 * len(story) - cached_tokens
    assert prefill["cached_tokens"] == cached_tokens
    shared = decode["shared_tokens"]
    assert 0 < shared < len(story)
    assert decode["received_tokens"] == 2 * len(story) - shared
    third, three = await home.complete(story, KIVI)
    assert (third, three.kv["cached_bytes"]) == (second, two.kv["cached_bytes"])


@pytest.fixture
def attached_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is encoded before it is known what the other side has."""
    restart, has, queues = SendQueue.restart, OutgoingHandoff.has, set[SendQueue]()
    changed = threading.Condition()

    def note(self: SendQueue, *arguments: Any) -> None:
        restart(self, *arguments)
        with changed:
            queues.add(self)
            changed.notify_all()

    def ask(self: OutgoingHandoff, item: Item) -> bool:
        queue = self.senders[0].queue
        with changed:
            assert changed.wait_for(lambda: queue in queues, timeout=30)
        return has(self, item)

    monkeypatch.setattr(SendQueue, "restart", note)
    monkeypatch.setattr(OutgoingHandoff, "has", ask)


@pytest.mark.usefixtures("attached_first")
@pytest.mark.parametrize("codec", ["gear:bits=4", "banded", f"{KIVI},sink=64"])
async def test_what_the_other_side_has_is_not_encoded(codec, home, story, monkeypatch):
    """Of the prompt that comes again no page is written, and the answer is the same."""
    left_out: list[int] = []
    commit = OutgoingHandoff.commit

    async def note(self: OutgoingHandoff, *arguments: Any) -> Any:
        stats = await commit(self, *arguments)
        left_out.append(
            sum(item.kind is Kind.PAGE for item in self.senders[0].queue._not_encoded)
        )
        return stats

    monkeypatch.setattr(OutgoingHandoff, "commit", note)
    first, second = [await home.complete(story, codec) for _ in range(2)]
    assert first[0] == second[0]
    plan = home.workers["d"].engine.plan(codec)
    pages = sum(x.kind is Kind.PAGE for x in Manifest(plan, len(story)).items)
    assert left_out == [0, pages]


@pytest.mark.usefixtures("attached_first")
async def test_a_page_left_out_and_gone_is_computed_by_the_next_attempt(
    home, story, monkeypatch
):
    """The receiver, attached to again, has no more what it said it had."""
    expected, _ = await home.complete(story, KIVI)
    finish, missed = Sender.finish, list[Item]()

    def miss(self: Sender, *arguments: Any) -> None:
        if not missed:
            missed.append(min(self.queue._not_encoded))
            peer_has = dict(self.queue.peer_has)
            del peer_has[self.queue.manifest.index_of(*missed)]
            self.queue.restart(peer_has, self.queue.credit)
        finish(self, *arguments)

    monkeypatch.setattr(Sender, "finish", miss)
    tokens, _ = await home.complete(story, KIVI)
    assert missed
    assert tokens == expected
    assert home.router.table.retries == 1
    assert home.workers["p"].service.prefill.failures == {TransferError.reason: 1}
