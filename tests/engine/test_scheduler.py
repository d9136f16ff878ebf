import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.engine.scheduler import Scheduler, urgency
from disagg.engine.sequence import ARROWS, Request, SamplingParams, Sequence, Status
from disagg.errors import CapacityError
from disagg.kv.arena import HostArena
from disagg.kv.decode_slots import DecodeSlots
from disagg.kv.pool import Pool

SHAPE = KVShape.uniform(2, 2, 64, "float32")
KIVI = "kivi:bits=2,group=64,residual=64"


def make(
    arena_bytes: int = 4 << 20,
    tokens: int = 100,
    sequences: int = 8,
    watermark: float = 0,
):
    pool = Pool(HostArena(bytearray(arena_bytes)), slab_bytes=1 << 18)
    return Scheduler(pool, tokens, DecodeSlots(sequences), watermark), pool


def sequence(
    order: int, prompt: int, codec: str = KIVI, emitted: int = 0, born: float = 0.0
) -> Sequence:
    request = Request(str(order), (1,) * prompt, SamplingParams(max_tokens=50), codec)
    return Sequence(
        request, parse_plan(codec, SHAPE), born, order, emitted=[2] * emitted
    )


def admit_all(scheduler: Scheduler) -> list[Sequence]:
    admitted = []
    for prompt in scheduler.prompts(now=0.0):
        if prompt.status is Status.QUEUED:
            if not scheduler.admit(prompt):
                break
            prompt.enter(Status.PREFILL)
            admitted.append(prompt)
    return admitted


def decoding(scheduler: Scheduler, order: int, prompt: int, emitted: int) -> Sequence:
    """A sequence whose prompt is prefilled already."""
    prefilled = sequence(order, prompt, emitted=emitted)
    scheduler.queue(prefilled)
    assert admit_all(scheduler) == [prefilled]
    prefilled.enter(Status.DECODE)
    prefilled.n = prompt
    return prefilled


def test_who_came_first_is_served_first_also_after_a_preemption():
    scheduler, _ = make()
    for order in (2, 0, 1):
        scheduler.queue(sequence(order, 30))
    assert [x.order for x in admit_all(scheduler)] == [0, 1, 2]
    victim = scheduler.preempt()
    assert (victim.order, victim.n, victim.groups) == (2, 0, ())
    scheduler.queue(sequence(3, 30))
    assert [x.order for x in scheduler.waiting] == [2, 3]


def test_the_least_work_left_goes_first_and_waiting_halves_it_every_second():
    scheduler, _ = make()
    for order, prompt, born in ((0, 80, 0.0), (1, 20, 0.0), (2, 21, 2.0), (3, 19, 2.0)):
        scheduler.queue(sequence(order, prompt, born=born))
    assert [x.order for x in scheduler.prompts(now=2.0)] == [1, 3, 0, 2]
    begun = scheduler.waiting[0]
    assert scheduler.admit(begun)
    begun.enter(Status.PREFILL)
    begun.n = 70
    assert [x.order for x in scheduler.prompts(now=2.0)] == [0, 1, 3, 2]


def test_urgency_is_defined_for_all_that_ever_waits():
    assert urgency(1500, 0.0) == 1500
    assert urgency(1500, 1.0) == urgency(750, 0.0)
    assert 0 <= urgency(1500, 1e9) <= urgency(1, 1e6)


def test_decoding_is_never_held_back_and_replays_use_what_is_spare():
    scheduler, _ = make(tokens=12)
    for order, emitted in ((0, 1), (1, 40), (2, 40)):
        decoding(scheduler, order, 30, emitted)
    assert [share.count for share in scheduler.schedule_decodes()] == [1, 10, 1]
    scheduler, _ = make(tokens=2)
    for order in range(3):
        decoding(scheduler, order, 30, emitted=40)
    assert [share.count for share in scheduler.schedule_decodes()] == [1, 1, 1]


def test_a_replayed_block_ends_before_the_next_seal():
    scheduler, _ = make(tokens=500)
    replayed = decoding(scheduler, 0, 100, emitted=49)
    (share,) = scheduler.schedule_decodes()
    assert share.count == 27  # 127 tokens: one more would seal a page
    replayed.n += 27
    (share,) = scheduler.schedule_decodes()
    assert (share.count, share.completes) == (22, True)


def test_a_share_of_the_pool_stays_free_for_sequences_that_grow():
    for watermark, expected in ((0.0, 4), (0.4, 2)):
        scheduler, pool = make(arena_bytes=4 << 18, watermark=watermark)
        assert pool.arena.nbytes == 4 * parse_plan("raw", SHAPE).nbytes(128)
        for order in range(5):
            scheduler.queue(sequence(order, 127, "raw"))
        assert len(admit_all(scheduler)) == expected


def test_one_prompt_may_have_the_whole_pool_and_no_prompt_more():
    scheduler, pool = make(arena_bytes=1 << 18, watermark=0.5)
    fitting = (1 << 18) // parse_plan("raw", SHAPE).nbytes(16) * 16
    scheduler.queue(sequence(0, fitting, "raw"))
    assert len(admit_all(scheduler)) == 1
    scheduler.remove(scheduler.active[0])
    assert not pool.referenced_pages
    scheduler.queue(sequence(1, fitting + 1, "raw"))
    with pytest.raises(CapacityError):
        scheduler.admit(scheduler.waiting[0])
    assert not pool.referenced_pages


def test_at_most_so_many_sequences_compute_at_once():
    scheduler, _ = make(sequences=2)
    for order in range(3):
        scheduler.queue(sequence(order, 10))
    assert len(admit_all(scheduler)) == 2


def test_what_another_worker_was_offered_is_not_preempted():
    scheduler, _ = make()
    for order in range(2):
        scheduler.queue(sequence(order, 10))
    _, newest = admit_all(scheduler)
    newest.handoff = object()  # type: ignore[assignment]
    victim = scheduler.preempt()
    assert victim.order == 0
    assert scheduler.preempt() is None


def test_who_is_to_have_the_pool_to_itself_comes_first_and_nobody_beside_it():
    scheduler, _ = make()
    for order, prompt in ((0, 20), (1, 90), (2, 20)):
        scheduler.queue(sequence(order, prompt))
    scheduler.exclusive = scheduler.waiting[1]
    assert [x.order for x in admit_all(scheduler)] == [1]
    scheduler.remove(scheduler.active[0])
    assert [x.order for x in admit_all(scheduler)] == [0, 2]


def test_who_was_preempted_waits_until_the_others_have_less():
    scheduler, _ = make()
    for order in range(3):
        scheduler.queue(sequence(order, 30))
    first, *_ = admit_all(scheduler)
    victim = scheduler.preempt()
    assert not scheduler.admit(victim)
    scheduler.remove(first)
    assert scheduler.admit(victim)


def test_every_state_can_end_and_the_end_is_final():
    assert set(ARROWS) == set(Status)
    assert all(
        Status.DONE in after
        for before, after in ARROWS.items()
        if before != Status.DONE
    )
    assert ARROWS[Status.DONE] == ()
    ended = sequence(0, 1)
    ended.enter(Status.DONE)
    with pytest.raises(AssertionError, match="done does not become decode"):
        ended.enter(Status.DECODE)
