"""Hand-offs between groups of ranks of different sizes, whose ranks are arenas of one process."""

import asyncio
from contextlib import suppress
from functools import cache
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.codecs import codec_names
from disagg.codecs.planning import KVShape, parse_plan
from disagg.errors import (
    AbortedError,
    CorruptFrameError,
    DeadlineError,
    DisaggError,
    LayoutError,
    ReservationError,
    TransferError,
)
from disagg.kv.page import make_state_layout
from disagg.kv.plan import LayerShape, Plan
from disagg.transfer.partition import part_nonce
from disagg.wire import Buffer, message_frame, pack, unpack
from tests.transfer.desk import corrupt
from tests.transfer.groups import (
    Handoff,
    ReceivingGroup,
    SendingRank,
    bytes_of,
    receiving_group,
    sending_group,
    slice_bytes,
)
from tests.transfer.prompts import Prompt, make_prompt, make_related

SHAPES = [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)]
TOKENS = 300


def make_plan(spec: str, heads: int = 4) -> Plan:
    full = LayerShape(heads, 64)
    windowed = LayerShape(heads, 64, window=100)
    return parse_plan(spec, KVShape((full, windowed), "float16"))


@cache
def make_whole(spec: str, tokens: int = TOKENS, heads: int = 4) -> Prompt:
    return make_prompt(tokens, plan=make_plan(spec, heads))


def make_handoff(whole: Prompt, senders: int, receivers: int) -> Handoff:
    sending = sending_group(whole, senders)
    return Handoff(whole, sending, receiving_group(whole, receivers))


def check_admitted(whole: Prompt, group: ReceivingGroup, rid: str = "r") -> None:
    """Every rank has its heads, byte for byte, those of unfilled rows too."""
    ranks = len(group.arenas)
    for rank, expected in enumerate(slice_bytes(whole, ranks)):
        assert group.bytes_of(rank, rid) == expected


async def settle() -> None:
    """Let what was scheduled run: followers close their parts."""
    for _ in range(5):
        await asyncio.sleep(0)


async def check_idle(group: ReceivingGroup) -> None:
    await settle()
    group.assert_nothing_held()
    assert [service.parts.num_open for service in group.services] == [0] * len(
        group.services
    )


@pytest.mark.parametrize(
    ("senders", "receivers"), SHAPES, ids=[f"{a}-to-{b}" for a, b in SHAPES]
)
@pytest.mark.parametrize("spec", codec_names())
async def test_every_rank_gets_its_heads_of_one_worker(spec, senders, receivers):
    whole = make_whole(spec)
    handoff = make_handoff(whole, senders, receivers)

    await handoff.run(whole)

    check_admitted(whole, handoff.receivers)
    handoff.receivers.free()
    await check_idle(handoff.receivers)


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 3), (3, 2)])
async def test_neither_number_of_ranks_has_to_divide_the_other(senders, receivers):
    whole = make_whole("gear", heads=6)
    handoff = make_handoff(whole, senders, receivers)

    await handoff.run(whole)

    check_admitted(whole, handoff.receivers)


@pytest.mark.parametrize("tokens", [1, 63, 64, 130])
async def test_short_prompts_arrive_whole_in_parts(tokens):
    whole = make_whole("banded", tokens)
    handoff = make_handoff(whole, 2, 4)

    await handoff.run(whole)

    check_admitted(whole, handoff.receivers)


async def test_a_prompt_with_a_part_missing_is_not_admitted():
    whole = make_whole("gear")
    handoff = make_handoff(whole, 2, 4)
    group = handoff.receivers
    await handoff.begin(whole)
    for part in range(4):
        handoff.push(part)
    for part in (0, 1, 3):
        await handoff.commit(part)

    assert not group.engine
    assert group.ledger.gauges()["reservations"] == 1

    await handoff.commit(2)
    check_admitted(whole, group)


@pytest.mark.parametrize("part", [0, 1])
async def test_a_commit_is_refused_while_an_item_of_its_part_is_missing(part):
    """Part 0 lies at rank 0, part 1 at its follower."""
    whole = make_whole("kivi")
    handoff = make_handoff(whole, 2, 2)
    await handoff.begin(whole)
    *messages, last = handoff.messages(part)
    endpoint = handoff.receivers.endpoint(part)
    for message in messages:
        endpoint.take(message_frame(message), handoff)

    with pytest.raises(TransferError, match="never came"):
        await handoff.commit(part)
    endpoint.take(message_frame(last), handoff)
    await handoff.commit(part)
    assert not handoff.receivers.engine


@pytest.mark.parametrize("receivers", [1, 2])
async def test_a_damaged_frame_is_dropped_and_sent_again(receivers):
    whole = make_whole("kivi")
    handoff = make_handoff(whole, 2, receivers)
    await handoff.begin(whole)
    endpoint = handoff.receivers.endpoint(handoff.partition.receiver_of(1))
    messages = list(handoff.messages(1))
    damaged = corrupt(unpack(message_frame(messages[0])))

    answer = endpoint.take(b"".join(pack(damaged)), handoff)

    assert isinstance(answer.error, CorruptFrameError)
    for message in reversed(messages):  # any order will do
        assert endpoint.take(message_frame(message), handoff).error is None
    handoff.push(0)
    await handoff.commit(1)
    await handoff.commit(0)
    check_admitted(whole, handoff.receivers)


async def test_a_part_that_attaches_again_sends_what_is_missing():
    whole = make_whole("raw")
    handoff = make_handoff(whole, 1, 2)
    await handoff.reserve(whole)
    await handoff.attach(0)
    handoff.push(0)
    await handoff.attach(1)
    first, *_ = handoff.messages(1)
    follower = handoff.receivers.endpoint(1)
    follower.take(message_frame(first), handoff)
    follower.channel_ended(handoff)

    attached = await handoff.attach(1, gen=2)

    assert set(attached.have) == set(unpack(message_frame(first)).indices)
    late = follower.take(message_frame(first), handoff)
    assert isinstance(late.error, ReservationError)
    handoff.push(1, gen=2)
    await handoff.commit(0)
    await handoff.commit(1, gen=2)
    check_admitted(whole, handoff.receivers)


async def test_an_abort_closes_the_parts_before_pages_are_free():
    whole = make_whole("kivi")
    handoff = make_handoff(whole, 2, 2)
    group = handoff.receivers
    await handoff.begin(whole)
    late = [next(handoff.messages(part)) for part in range(2)]

    group.ledger.abort("r", 0, "the client left")

    assert group.pool.referenced_pages
    await check_idle(group)
    for part, message in enumerate(late):
        before = bytes(group.arenas[part].read(0, group.arenas[part].nbytes))
        answer = group.endpoint(part).take(message_frame(message), handoff)
        assert isinstance(answer.error, ReservationError)
        assert group.arenas[part].read(0, len(before)) == before
    with pytest.raises(AbortedError):
        await handoff.attach(1, gen=2)


async def test_one_lease_ends_all_parts():
    whole = make_whole("kivi")
    handoff = make_handoff(whole, 2, 4)
    group = handoff.receivers
    await handoff.begin(whole)
    handoff.push(3)
    await handoff.commit(3)
    lease_s = group.policy.lease_s

    assert group.at(0.9 * lease_s).renew([handoff.ticket(1)]) == ()
    assert group.at(1.8 * lease_s).renew([handoff.ticket(2)]) == ()
    over = group.at(3.0 * lease_s).renew(map(handoff.ticket, range(4)))

    nonces = [part_nonce(handoff.grant.nonce, part) for part in range(4)]
    assert list(over) == nonces
    assert not group.engine
    await check_idle(group)


async def test_the_same_commit_again_gets_the_same_answer():
    whole = make_whole("kivi")
    handoff = make_handoff(whole, 1, 2)
    await handoff.run(whole)

    await handoff.commit(1)
    await handoff.commit(0)

    assert [*handoff.receivers.engine] == ["r"]
    with pytest.raises(ReservationError, match="another commit"):
        await handoff.commit(1, first_token=6)


async def test_parts_of_different_answers_are_refused():
    whole = make_whole("kivi")
    handoff = make_handoff(whole, 2, 2)
    await handoff.begin(whole)
    for part in range(2):
        handoff.push(part)
    await handoff.commit(0, first_token=5)

    with pytest.raises(CorruptFrameError, match=r"first tokens \[5, 6\]"):
        await handoff.commit(1, first_token=6)
    assert not handoff.receivers.engine


async def test_frames_of_a_follower_are_refused_by_rank_0():
    whole = make_whole("kivi")
    handoff = make_handoff(whole, 1, 2)
    await handoff.reserve(whole)
    await handoff.attach(1)
    message = next(handoff.messages(1))

    answer = handoff.receivers.endpoint(0).take(message_frame(message), handoff)
    assert "belongs to rank 1" in str(answer.error)


def make_cached(tokens: int, seed: int) -> Prompt:
    return make_related(tokens, seed, shared=500, plan=make_plan("gear"))


async def give(whole: Prompt, senders: int, group: ReceivingGroup, rid: str) -> int:
    handoff = Handoff(whole, sending_group(whole, senders), group)
    await handoff.run(whole, rid=rid)
    check_admitted(whole, group, rid)
    return sum(queue.payload_bytes for queue in handoff.queues)


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 2), (4, 2)])
async def test_cached_blocks_are_not_sent_again_in_any_part(senders, receivers):
    first, second = make_cached(1500, 1), make_cached(1500, 1)
    group = receiving_group(first, receivers)
    sent = await give(first, senders, group, "one")
    group.free()
    await settle()

    sent_again = await give(second, senders, group, "two")

    assert 0 < sent_again < sent


async def test_blocks_from_a_group_of_another_size_are_not_shared():
    """Their bytes differ above the first layer: a retry from such a group is sent whole."""
    whole = make_cached(1500, 1)
    group = receiving_group(whole, 2)
    sent = await give(whole, 2, group, "one")
    group.free()
    await settle()

    assert await give(whole, 4, group, "two") == sent
    assert await give(whole, 1, group, "three") == sent


async def test_a_retry_from_a_group_of_another_size_replaces_the_attempt():
    whole = make_whole("kivi")
    group = receiving_group(whole, 2)
    begun = Handoff(whole, sending_group(whole, 2), group)
    await begun.reserve(whole)
    await begun.attach(1)
    begun.push(1)

    retry = Handoff(whole, sending_group(whole, 4), group)
    await retry.run(whole, attempt=1)

    check_admitted(whole, group)
    with pytest.raises(AbortedError):
        await begun.commit(1)
    group.free()
    await check_idle(group)


@pytest.mark.parametrize(
    ("senders", "ranks", "rank"), [(2, 1, 0), (2, 2, 1), (4, 2, 1)]
)
async def test_a_damaged_cached_part_is_found_at_its_rank(senders, ranks, rank):
    whole = make_cached(1500, 1)
    group = receiving_group(whole, ranks)
    await give(whole, senders, group, "one")
    group.free()
    await settle()
    await group.receiver.scrub(1 << 30)
    assert not group.ledger.counts["damaged"]

    flip_last_byte_of_a_block(group, rank)
    await group.receiver.scrub(1 << 30)

    assert group.ledger.counts["damaged"] == 1
    await check_idle(group)


def flip_last_byte_of_a_block(group: ReceivingGroup, rank: int) -> None:
    """Of a cached block, on one rank."""
    (key, *_) = group.pool.kept_keys()
    (entry,) = group.pool.take([key])
    group.pool.release(entry.pages)
    *_, (_, (start, nbytes), _) = entry.note.items(rank)
    arena = group.arenas[rank]
    flipped = arena.read(start + nbytes - 1, 1)[0] ^ 1
    arena.write([(start + nbytes - 1, bytes([flipped]))])


async def test_a_follower_that_does_not_answer_holds_up_no_verification(monkeypatch):
    whole = make_cached(1500, 1)
    group = receiving_group(whole, 2)
    await give(whole, 2, group, "one")
    group.free()
    await settle()

    async def fails(spans: object) -> list[int]:
        raise DeadlineError("frozen")

    monkeypatch.setattr(group.services[0], "digests", fails)
    flip_last_byte_of_a_block(group, 0)
    await group.receiver.scrub(1 << 30)

    assert group.ledger.counts["damaged"] == 1
    await check_idle(group)


async def test_heads_that_do_not_divide_are_refused_before_room_is_taken():
    whole = make_whole("kivi")
    group = receiving_group(whole, 2)
    job = whole.job(senders=3)

    with pytest.raises(LayoutError, match=r"2 KV heads.* among 3"):
        await group.receiver.reserve(job, group.ledger.epoch)
    group.assert_nothing_held()


async def test_latents_and_states_cross_between_groups_of_one_size():
    """Each rank has all of them, and hands its own to the same rank of the other group."""
    latent = LayerShape(1, 96, latent=64)
    state = make_state_layout([("conv0", "float32", (4, 8))])
    shape = KVShape((latent,), "float16", states=(state,))
    whole = make_prompt(TOKENS, plan=parse_plan("kivi", shape))
    rank = SendingRank(whole.plan, whole.pool.arena, whole.states)
    group = ReceivingGroup(whole.plan, 2)

    await Handoff(whole, [rank, rank], group).run(whole)

    expected = bytes_of(rank.arena, rank.plan, rank.states)
    assert group.bytes_of(0) == expected
    assert group.bytes_of(1) == expected


async def test_a_follower_that_cannot_open_its_parts_ends_the_reservation(monkeypatch):
    whole = make_whole("kivi")
    handoff = make_handoff(whole, 1, 2)
    group = handoff.receivers

    def fails(opening: object) -> None:
        raise ReservationError("no memory")

    monkeypatch.setattr(group.services[0].parts, "open", fails)
    with pytest.raises(ReservationError, match="no memory"):
        await handoff.reserve(whole)
    await check_idle(group)


def test_two_workers_of_one_model_have_one_plan_at_any_size():
    whole = make_plan("gear")
    plans = [whole.divided(ranks).of_group(ranks) for ranks in (1, 2, 4)]
    assert len({plan.fingerprint for plan in plans}) == 1


@pytest.mark.parametrize("spec", ["raw", "kivi:bits=2", "ott"])
async def test_parts_add_less_than_two_percent_to_the_bytes_on_the_wire(spec):
    """Counted: every message both ways. Eight parts are the smallest of eight heads."""
    plan = parse_plan(spec, KVShape.uniform(1, 8, 128, "bfloat16"))
    whole = make_prompt(512, plan=plan)

    one = await make_handoff(whole, 1, 1).run(whole)
    eight = await make_handoff(whole, 8, 8).run(whole)

    assert one < eight < 1.02 * one


EVENTS = st.sampled_from(["attach", "frame", "spoilt", "commit", "break", "commit"])
PART = st.integers(0, 3)


class Interleaving:
    """The parts of one hand-off, whose events come in any order, and what should be true."""

    def __init__(self, whole: Prompt):
        self.handoff = make_handoff(whole, 2, 4)
        self.gens = [0] * 4
        self.committed = set[int]()

    @property
    def group(self) -> ReceivingGroup:
        return self.handoff.receivers

    async def event(self, kind: str, part: int) -> None:
        """One event, which may be refused, with an error of ours."""
        with suppress(DisaggError):
            await getattr(self, kind)(part)

    async def attach(self, part: int) -> None:
        self.gens[part] += 1
        attached = await self.handoff.attach(part, self.gens[part])
        assert not attached.admitted or self.committed == set(range(4))

    async def frame(self, part: int) -> None:
        """The next frame that is missing, small as it is."""
        queue = self.handoff.queues[part]
        queue.frame_bytes = 1 << 13
        for message in islice(self.handoff.messages(part, self.gens[part]), 2):
            self.take(part, message_frame(message))

    async def spoilt(self, part: int) -> None:
        for message in islice(self.handoff.messages(part, self.gens[part]), 1):
            damaged = corrupt(unpack(message_frame(message)))
            self.take(part, b"".join(pack(damaged)))

    def take(self, part: int, frame: Buffer) -> None:
        self.group.endpoint(part).take(frame, (self, part))

    async def commit(self, part: int) -> None:
        await self.handoff.commit_early(part, self.gens[part])
        self.committed.add(part)

    async def break_(self, part: int) -> None:
        self.group.endpoint(part).channel_ended((self, part))


async def run_events(whole: Prompt, events: list[tuple[str, int]]) -> None:
    run = Interleaving(whole)
    await run.handoff.reserve(whole)
    for kind, part in events:
        await run.event("break_" if kind == "break" else kind, part)
        assert bool(run.group.engine) == (run.committed == set(range(4)))
    for part in range(4):  # whatever happened, a sender that attaches again succeeds
        if part not in run.committed:
            await run.attach(part)
            run.handoff.push(part, run.gens[part])
            await run.commit(part)
    check_admitted(whole, run.group)
    run.group.free()
    await check_idle(run.group)


@settings(max_examples=25, deadline=None)
@given(events=st.lists(st.tuples(EVENTS, PART), max_size=24))
def test_no_order_of_events_admits_a_part_too_few_or_stops_a_sender(events):
    whole = make_whole("kivi", 130)
    asyncio.run(run_events(whole, events))
