"""What a worker keeps for its router, and when it forgets."""

import tracemalloc
from collections.abc import Mapping
from dataclasses import replace

import pytest

from disagg.engine.sequence import Logprobs
from disagg.errors import ConfigError, PeerLostError
from disagg.transfer.messages import Load, StepEvents, TokenEvent
from disagg.worker.event_log import EventLog


def token(index: int, attempt: int = 1, reason: str = "") -> TokenEvent:
    return TokenEvent("r", attempt, index, 100 + index, reason)


async def first_batch(events: EventLog, have: Mapping[str, int]) -> list[TokenEvent]:
    stream = events.subscribe(have)
    step = await anext(stream)
    await stream.aclose()
    return list(step.events)


async def test_a_router_that_comes_back_hears_what_it_lacks():
    events = EventLog()
    events.publish([token(0), token(1), token(2)])
    assert await first_batch(events, {"r": 2}) == [token(2)]
    assert await first_batch(events, {}) == [token(0), token(1), token(2)]


async def test_an_end_is_repeated_even_if_its_token_is_known():
    events = EventLog()
    events.publish([token(0), token(1, reason="length")])
    assert await first_batch(events, {"r": 2}) == [token(1, reason="length")]


async def test_a_new_attempt_replaces_what_the_old_one_said():
    events = EventLog()
    events.publish([token(0), token(1)])
    events.publish([token(1, attempt=2)])
    assert await first_batch(events, {}) == [token(1, attempt=2)]


async def test_what_ended_is_kept_until_the_router_says_so_and_a_hand_off_until_its_figures():
    events = EventLog()
    events.publish([token(0, reason="stop"), TokenEvent("s", 1, 0, 7)])
    for _ in range(3):
        assert len(await first_batch(events, {})) == 2
    events.publish([TokenEvent("s", 1, 0, stats={"wire_bytes": 1})])
    assert events.num_requests == 1
    events.forget("r", 1)
    assert events.num_requests == 0


async def test_an_abort_forgets_its_attempt_and_no_later_one():
    events = EventLog()
    events.publish([TokenEvent("r", 2, 0, error=PeerLostError("x"))])
    events.forget("r", 1)
    assert events.num_requests == 1
    events.forget("r", 2)
    assert events.num_requests == 0


async def test_what_is_said_reaches_an_open_stream_with_what_could_be_taken():
    loads = iter([Load(1), Load(2), Load(3)])
    events = EventLog(lambda: next(loads))
    stream = events.subscribe({})
    assert await anext(stream) == StepEvents((), Load(1))
    assert events.is_followed
    events.publish([token(0)])
    assert await anext(stream) == StepEvents((token(0),), Load(2))
    events.publish([])
    assert await anext(stream) == StepEvents((), Load(3))
    await stream.aclose()
    assert not events.is_followed


async def test_a_worker_follows_the_first_router_until_it_is_gone():
    events = EventLog()
    first = events.subscribe({}, "one")
    await anext(first)
    with pytest.raises(ConfigError, match="follows router one, not two"):
        await anext(events.subscribe({}, "two"))
    again = events.subscribe({}, "one")
    await anext(again)
    await first.aclose()
    assert events.is_followed
    await again.aclose()
    second = events.subscribe({}, "two")
    await anext(second)
    assert events.router == "two"
    await second.aclose()


async def test_tokens_that_the_router_has_are_dropped():
    events = EventLog()
    events.publish(token(index) for index in range(1000))

    events.acknowledge({"r": 998})

    assert len(events._records["r"]) == 2
    assert await first_batch(events, {"r": 998}) == [token(998), token(999)]


async def test_an_acknowledgement_in_mid_answer_drops_what_is_below():
    events = EventLog()
    with_stats = replace(token(0), stats={"cached_tokens": 5})
    events.publish([with_stats, token(1), token(2), token(3)])

    events.acknowledge({"r": 2})
    events.publish([token(4)])

    assert await first_batch(events, {"r": 2}) == [token(2), token(3), token(4)]


async def test_tokens_are_kept_after_an_acknowledgement_and_an_error():
    events = EventLog()
    error = TokenEvent("r", 1, 0, error=PeerLostError("x"))
    events.publish([error, token(0)])

    events.acknowledge({"r": 1})
    events.publish([token(1)])

    assert await first_batch(events, {"r": 1}) == [error, token(1)]


async def test_log_probabilities_come_back_as_they_were():
    events = EventLog()
    plain = [token(index) for index in range(2)]
    own = [replace(token(index), logprobs=((-0.5, ()),)) for index in range(2, 4)]
    likeliest = [
        replace(token(index), logprobs=((-0.1 * index, ((7, -0.2), (8, -index / 3))),))
        for index in range(4, 9)
    ]
    of_prompt = replace(token(9), logprobs=((-1.0, ()), (-2.0, ()), (-3.0, ())))
    answer = [*plain, *own, *likeliest, of_prompt]
    events.publish(answer)

    for num_tokens in range(11):
        events.acknowledge({"r": num_tokens})

        assert await first_batch(events, {"r": num_tokens}) == answer[num_tokens:]


async def test_a_repeated_token_is_kept_twice():
    events = EventLog()
    events.publish([token(0), token(1), token(1), token(2)])

    batch = await first_batch(events, {"r": 1})

    assert batch == [token(1), token(1), token(2)]


async def test_a_late_event_of_a_replaced_attempt_changes_nothing():
    events = EventLog()
    events.publish([token(3, attempt=2)])
    late_stats = TokenEvent("r", 1, 0, stats={"wire_bytes": 1})

    events.publish([token(3, attempt=1), late_stats])

    assert await first_batch(events, {}) == [token(3, attempt=2)]


def scores(index: int, num_likeliest: int) -> tuple[Logprobs, ...]:
    likeliest = tuple(
        (1000 + index + i, -0.25 - index - i) for i in range(num_likeliest)
    )
    return ((-0.5 - index, likeliest),)


@pytest.mark.parametrize(
    ("num_likeliest", "max_bytes"),
    [(None, 8), (0, 24), (20, 400)],
    ids=["token", "own", "likeliest"],
)
def test_a_token_takes_few_bytes(num_likeliest, max_bytes):
    num_tokens = 10_000
    events = EventLog()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()

    for index in range(num_tokens):
        logprobs = () if num_likeliest is None else scores(index, num_likeliest)
        events.publish([TokenEvent("r", 1, index, 1000 + index, logprobs=logprobs)])

    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / num_tokens <= max_bytes


async def test_an_acknowledged_attempt_is_still_known_by_its_last_event():
    events = EventLog()
    events.publish([token(0), token(1)])

    events.acknowledge({"r": 2, "unknown": 5})

    assert events.last_event("r", 1) == token(1)
    events.forget("r", 1)
    assert events.num_requests == 0


async def test_an_answer_acknowledged_each_second_stays_small():
    events = EventLog()
    lengths = []
    for index in range(32_768):
        events.publish([token(index)])
        if index % 50 == 49:  # a second of decoding
            events.acknowledge({"r": index + 1})
        lengths.append(len(events._records["r"]))

    assert max(lengths) <= 51


async def test_an_end_outlives_its_acknowledgement():
    events = EventLog()
    end = token(1, reason="stop")
    events.publish([token(0), end])

    events.acknowledge({"r": 2})

    assert await first_batch(events, {"r": 2}) == [end]
