"""Placing: how much work it is, and which requests wait for room."""

from collections import Counter
from dataclasses import replace

import pytest

from disagg.config import RouterConfig
from disagg.engine.sequence import urgency
from disagg.router import request_state
from disagg.router.actions import Reserve, Start
from disagg.router.placement import PATIENCE_S
from disagg.router.request_queue import RequestQueue
from disagg.router.request_state import Phase, RequestState, token_array
from disagg.router.requests import STARTS_AT_ONCE
from disagg.router.worker_state import WorkerState
from disagg.transfer.messages import Load, Role, TokenEvent, WorkerInfo
from tests.router.rules import Rules
from tests.router.test_requests import begin, house, job, only, room

NUM_WORKERS = 64  # of each role
TOKEN_BYTES = 1000
ROOMY = Load(1 << 40, 1000)
FULL = Load(0, 0)


@pytest.fixture
def looks(monkeypatch) -> Counter[str]:
    """By worker, how often placing looked for room there."""
    counts = Counter[str]()
    find_room = WorkerState.room

    def count(self: WorkerState, *arguments: float) -> float:
        counts[self.name] += 1
        return find_room(self, *arguments)

    monkeypatch.setattr(WorkerState, "room", count)
    return counts


def large_house(decode_load: Load) -> Rules:
    table = Rules(RouterConfig(deadline_s=1e6))
    for number in range(NUM_WORKERS):
        for role in (Role.PREFILL, Role.DECODE):
            name = f"{role}{number}"
            table.worker_up(WorkerInfo(name, role, name, 1), 0.0)
            load = ROOMY if role is Role.PREFILL else decode_load
            table.update_load(name, load, 0.0)
    return table


def arrive(table: Rules, number: int, tokens: int = 500) -> None:
    """Prompts that share no prefix come, one by one."""
    first = len(table.requests)
    for index in range(first, first + number):
        prompt = token_array([index] * tokens)
        table.submit(replace(job(f"r{index}"), prompt=prompt), 0.0)


# -- how much work it is
def test_arrivals_at_full_workers_look_at_no_worker(looks):
    table = large_house(FULL)
    arrive(table, 1)
    looks.clear()

    arrive(table, 500)

    assert not looks
    assert table.num_queued == 501


def test_a_tick_looks_once_at_each_worker(looks):
    table = large_house(FULL)
    arrive(table, 500)
    looks.clear()

    table.tick(PATIENCE_S + 1)

    assert max(looks.values()) <= 2
    assert sum(looks.values()) <= 3 * NUM_WORKERS


def test_departures_from_the_queue_look_at_no_worker(looks):
    table = large_house(FULL)
    arrive(table, 500)
    looks.clear()

    for index in range(500):
        assert table.cancel(f"r{index}", 1.0) == []

    assert not looks
    assert not table.num_queued


def test_arrivals_at_busy_prefill_workers_look_at_no_worker(looks):
    table = large_house(ROOMY)
    arrive(table, 3 * NUM_WORKERS + 1, tokens=2000)
    looks.clear()

    arrive(table, 500, tokens=2000)

    assert not looks
    assert table.num_queued == 501


def test_one_call_starts_a_bounded_number():
    table = large_house(ROOMY)
    for index in range(STARTS_AT_ONCE + 9):
        table.table.submit(job(f"r{index}", 9), 0.0)

    first = table.table.place(0.0)
    second = table.table.place(0.0)

    assert (len(first), len(second)) == (STARTS_AT_ONCE, 9)
    assert not table.needs_placing


def test_a_breaker_that_closes_lets_one_request_in_at_once():
    table = house("p", "d")
    for now in (0.1, 0.2, 0.3):
        table.workers["d"].add_failure(now, now)
    table.submit(job("early"), 0.4)

    reserves = only(Reserve, table.submit(job("late"), 1.5))

    assert [x.job.rid for x in reserves] == ["early"]


def test_keys_of_a_prompt_that_waits_are_not_computed(monkeypatch):
    prompts = []
    find_keys = request_state.keys_of
    monkeypatch.setattr(
        request_state, "keys_of", lambda x: prompts.append(x) or find_keys(x)
    )
    table = house("p", "d")
    table.update_load("d", FULL, 0.0)
    table.submit(job("r", 500), 0.0)
    assert not prompts

    table.update_load("d", ROOMY, 1.0)

    assert table.requests["r"].phase is Phase.RESERVE
    assert len(prompts) == 1


def test_a_prompt_is_held_once_with_4_bytes_a_token():
    table = house("p", "d")
    prompt = token_array(range(1000))
    (reserve,) = table.submit(replace(job("r"), prompt=prompt), 0.0)

    assert reserve.job.prompt is prompt
    assert table.requests["r"].job.prompt is prompt
    assert prompt.itemsize == 4


# -- order
@pytest.mark.parametrize("now", [10.0, 1000.0])
def test_the_queue_has_the_order_of_the_engine(now):
    arrivals = [(1000, 0.0), (10, 6.0), (10, 7.0), (300, 1.0), (3, 9.9), (2000, 0.1)]
    requests = [
        RequestState(job(f"{index}", tokens), index, arrived=arrived, deadline=1e9)
        for index, (tokens, arrived) in enumerate(arrivals)
    ]
    queue = RequestQueue()
    for request in requests:
        queue.add(request)

    expected = sorted(
        requests, key=lambda x: urgency(x.num_prompt_tokens, now - x.arrived)
    )

    assert list(queue) == expected


def test_a_single_token_needs_no_room_to_decode():
    """A longer answer that waits for a decode worker does not hold it up."""
    table = house("p", "d")
    table.update_load("d", FULL, 0.0)
    table.submit(job("long"), 0.0)

    (start,) = table.submit(job("single", length=1), 0.0)

    assert isinstance(start, Start)
    assert start.worker == "p"


# -- room that is kept
def crowded(num_decodes: int, tokens_left: int = 4000) -> Rules:
    """Each decode worker has an answer under way, and room for a prompt of 20,000 tokens."""
    names = [f"d{number}" for number in range(num_decodes)]
    table = house("p", *names, deadline_s=1e6)
    figures = {"tokens": 1, "resident_bytes": TOKEN_BYTES}
    for number, name in enumerate(names):
        rid = f"running{number}"
        table.submit(job(rid, 300, length=tokens_left), 0.0, at=("", name))
        begin(table, "p", rid)
        table.token(name, rid, 1, 1, 7, 0.0)
        table.on_event("p", TokenEvent(rid, 1, 0, stats=figures), 0.0)
        table.update_load(name, Load(20_000 * TOKEN_BYTES, 60), 0.0)
    return table


def serve(table: Rules, rid: str, length: int, now: float) -> bool:
    """Whether a short prompt starts at once; it has left then."""
    has_started = bool(only(Reserve, table.submit(job(rid, 200, length), now)))
    table.cancel(rid, now)
    return has_started


@pytest.mark.parametrize("num_decodes", [1, 2, 8])
def test_long_prompts_that_wait_stop_no_short_ones(num_decodes):
    table = crowded(num_decodes)
    for number in range(num_decodes):
        table.submit(job(f"large{number}", 30_000), 0.0)

    served = []
    for second in range(1, 60):
        table.tick(float(second))
        served.append(serve(table, "short", 4, float(second)))

    assert all(served)


def test_at_most_one_worker_in_eight_is_kept():
    table = crowded(16)
    for number in range(16):
        table.submit(job(f"large{number}", 30_000), 0.0)
    table.tick(40.0)

    for number in range(16):
        table.submit(job(f"answer{number}", 200, length=9000), 40.0)
        begin(table, "p", f"answer{number}", 40.0)

    decodes = {table.requests[f"answer{number}"].decode for number in range(16)}
    assert len(decodes) == 14


def test_one_worker_lets_in_what_ends_in_time():
    table = crowded(1, tokens_left=100)
    table.submit(job("large", 30_000), 0.0)
    table.tick(40.0)

    assert serve(table, "in time", 98, 40.0)
    assert not serve(table, "too late", 99, 40.0)


def test_a_prompt_that_waited_starts_when_its_room_is_there():
    table = crowded(1, tokens_left=100)
    table.submit(job("large", 30_000), 0.0)
    table.tick(40.0)
    table.submit(job("other", 200, length=3000), 40.0)
    assert table.requests["other"].phase is Phase.QUEUED

    table.finished("d0", "running0", 1, 2, "stop", 41.0)

    assert table.requests["large"].phase is Phase.RESERVE


# -- sequences that move
def test_no_sequence_is_looked_at_while_all_decode_on(monkeypatch):
    looked_at = []
    monkeypatch.setattr(
        "disagg.router.requests.has_to_move",
        lambda request, workers, now: looked_at.append(request.rid) or False,
    )
    table = house("p", "d", "d2")
    for name in ("d", "d2"):
        rid = f"at {name}"
        table.submit(job(rid, length=100), 0.0, at=("", name))
        room(table, rid)
        begin(table, name, rid)
    table.tick(1.0)
    assert not looked_at

    table.update_load("d", Load(1 << 30, 10, role=Role.NONE), 2.0)

    assert set(looked_at) == {"at d"}
