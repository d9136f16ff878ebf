"""The router's rules without sockets, one by one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from disagg.config import RouterConfig
from disagg.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    DisaggError,
    LayoutError,
    PeerLostError,
    RequestError,
)
from disagg.router.actions import (
    AbortAttempt,
    Action,
    FailRequest,
    Reserve,
    Start,
    TokenOutput,
)
from disagg.router.moves import MOVE_TOKENS
from disagg.router.request_state import Phase, token_array
from disagg.router.requests import SPEAKS_S
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    TokenEvent,
    Work,
    WorkerInfo,
)
from tests.router.rules import Rules, end

GRANT = Grant(7, 1)
ROOM = Load(1 << 30, 10)


def job(rid: str = "r", tokens: int = 3, length: int = 4) -> Job:
    """Its prompt begins as no other does."""
    prompt = token_array((sum(rid.encode()),) * tokens)
    return Job(rid, 0, prompt, sampling={"max_tokens": length}, deadline_s=100.0)


def at(job: Job, attempt: int, *emitted: int, age_s: float = 0.0) -> Job:
    return replace(
        job,
        attempt=attempt,
        emitted=token_array(emitted),
        deadline_s=100.0 - age_s,
        waited_s=age_s,
    )


def house(*names: str, **config: float) -> Rules:
    """Workers by name: p.. prefills, d.. decodes, b.. does both."""
    table = Rules(RouterConfig(**({"deadline_s": 100.0} | config)))  # type: ignore[arg-type]
    for name in names:
        join(table, name, 0.0)
    return table


def join(table: Rules, name: str, now: float) -> list[Action]:
    role = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}[name[0]]
    return table.worker_up(WorkerInfo(name, role, name, 1), now)


def started(*names: str, **config: float) -> Rules:
    """Request "r" on its way from p to d."""
    table = house(*(names or ("p", "d")), **config)
    assert table.submit(job(), 0.0) == [Reserve("d", at(job(), 1))]
    assert room(table) == [Start("p", at(job(), 1), Work.PREFILL, "d", GRANT)]
    return table


def room(table: Rules, rid: str = "r") -> list[Action]:
    """The decode worker that was asked last has room."""
    entry = table.requests[rid]
    return table.on_grant(entry.workers[-1], rid, entry.job.attempt, GRANT)


def begin(table: Rules, worker: str, rid: str = "r", now: float = 0.0) -> None:
    """It gets its room, and this worker says its first token."""
    attempt = table.requests[rid].job.attempt
    room(table, rid)
    table.token(worker, rid, attempt, 0, 7, now)


def pairs(table: Rules, *rids: str) -> list[tuple[str | None, str | None]]:
    return [(table.requests[rid].prefill, table.requests[rid].decode) for rid in rids]


def told(by: str) -> Rules:
    """Request "r", of which this worker has said token 7."""
    table = started()
    assert table.token(by, "r", 1, 0, 7, 0.0) == [TokenOutput("r", 7)]
    return table


def only(kind: type, actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


# -- tokens
def test_a_token_said_twice_is_delivered_once() -> None:
    table = started()
    assert table.token("p", "r", 1, 0, 7, 0.0) == [TokenOutput("r", 7)]
    assert table.token("d", "r", 1, 0, 7, 0.0) == []
    assert table.unequal_tokens == 0
    assert table.token("d", "r", 1, 0, 8, 0.0) == []
    assert table.unequal_tokens == 1


def test_a_gap_starts_another_attempt_with_what_was_delivered() -> None:
    table = told("d")
    assert set(table.token("d", "r", 1, 2, 9, 0.0)) == {
        AbortAttempt("p", "r", 1),
        AbortAttempt("d", "r", 1),
    }
    assert table.tick(0.05) == []
    assert table.tick(0.1) == [Reserve("d", at(job(), 2, 7, age_s=0.1))]
    assert table.num_emitted("d") == {"r": 1}


def test_an_end_that_counts_more_tokens_than_arrived_is_no_end() -> None:
    table = told("d")
    assert not only(TokenOutput, table.finished("d", "r", 1, 2, "stop", 0.0))
    assert table.requests["r"].phase is Phase.QUEUED


def test_an_answer_that_its_first_token_ends_leaves_the_decode_worker() -> None:
    table = told("p")
    ended = [
        end("r", "stop"),
        AbortAttempt("p", "r", 1),
        AbortAttempt("d", "r", 1),
    ]
    assert table.finished("p", "r", 1, 1, "stop", 0.0) == ended


def test_a_worker_that_talks_of_what_is_over_is_told_again_but_not_all_the_time() -> (
    None
):
    table = started()
    assert table.cancel("r", 0.0) == [
        AbortAttempt("p", "r", 1),
        AbortAttempt("d", "r", 1),
    ]
    answers = [table.token("d", "r", 1, i, 7, i / 10) for i in range(25)]
    assert [
        i for i, actions in enumerate(answers) if actions == [AbortAttempt("d", "r", 1)]
    ] == [
        10,
        20,
    ]
    assert not any(actions for i, actions in enumerate(answers) if i not in (10, 20))
    assert table.cancel("r", 3.0) == []


def test_tokens_of_an_old_attempt_are_not_delivered() -> None:
    table = started("p", "d", "p2")
    again = Reserve("d", at(job(), 2, age_s=1.0))
    assert table.worker_down("p", 1.0) == [AbortAttempt("d", "r", 1), again]
    assert table.token("d", "r", 1, 0, 7, 1.0) == []
    assert table.finished("d", "r", 1, 0, "stop", 1.0) == []


def test_a_prefill_worker_that_never_heard_that_all_has_arrived_ends_no_answer() -> (
    None
):
    """The link broke after the commit; what the decode worker says proves that it came."""
    table = started()
    table.token("d", "r", 1, 0, 7, 0.0)
    lost = PeerLostError("no acknowledgement")
    assert table.refused("p", "r", 1, lost, 5.0) == [AbortAttempt("p", "r", 1)]
    assert table.token("d", "r", 1, 1, 8, 5.0) == [TokenOutput("r", 8)]
    assert table.retries == 0


# -- sequences that move
def decoding(length: int = 100) -> Rules:
    """Request "r" decodes at d: token 7 is known."""
    table = house("p", "d")
    table.submit(job(length=length), 0.0)
    begin(table, "d")
    return table


def leave(table: Rules, name: str = "d", role: Role = Role.NONE) -> list[Action]:
    return table.update_load(name, replace(ROOM, role=role), 1.0)


MOVED = replace(at(job(length=100), 1, 7), moved=3 + 1 + MOVE_TOKENS)


def leaving(role: Role = Role.NONE) -> Rules:
    """The same; d leaves, and d2 was asked for room."""
    table = decoding()
    join(table, "d2", 0.0)
    assert leave(table, "d", role) == [Reserve("d2", MOVED)]
    return table


def moving(role: Role = Role.NONE) -> Rules:
    """The same, on its way from d to d2."""
    table = leaving(role)
    assert room(table) == [Start("d", MOVED, Work.MOVE, "d2", GRANT)]
    return table


def test_who_reserves_says_how_many_ranks_will_hand_over() -> None:
    table = Rules(RouterConfig(deadline_s=100.0))
    table.worker_up(WorkerInfo("p", Role.PREFILL, "p", 1, ranks=4), 0.0)
    table.worker_up(WorkerInfo("d", Role.DECODE, "d", 1, ranks=2), 0.0)

    (reserve,) = table.submit(job(length=100), 0.0)
    assert reserve.job.senders == 4
    begin(table, "d")
    join(table, "d2", 0.0)
    (move,) = leave(table)
    assert move.job.senders == 2


@pytest.mark.parametrize("role", [Role.NONE, Role.PREFILL])
def test_a_worker_that_decodes_no_longer_gets_nothing_and_what_it_has_moves(
    role: Role,
) -> None:
    table = decoding()
    assert leave(table, "d", role) == []
    table.submit(job("s"), 1.0)
    assert not table.requests["s"].workers
    reserves = only(Reserve, join(table, "d2", 2.0))
    assert [(x.worker, x.job.rid) for x in reserves] == [("d2", "r"), ("d2", "s")]


def test_both_workers_of_a_move_may_say_a_token_and_it_is_delivered_once() -> None:
    table = moving()
    assert table.token("d", "r", 1, 1, 8, 1.0) == [TokenOutput("r", 8)]
    assert table.requests["r"].phase is Phase.MOVE
    assert table.token("d2", "r", 1, 1, 8, 1.0) == []
    assert table.token("d2", "r", 1, 2, 9, 1.0) == [TokenOutput("r", 9)]
    assert table.token("d", "r", 1, 2, 9, 1.0) == []
    assert (table.requests["r"].decode, table.moves) == ("d2", 1)
    assert table.worker_down("d", 2.0) == []
    ended = table.finished("d2", "r", 1, 3, "stop", 2.0)
    assert ended == [end("r", "stop"), AbortAttempt("d2", "r", 1)]
    assert table.unequal_tokens == table.retries == 0


def test_an_answer_that_ends_before_it_has_moved_frees_the_room_that_it_was_promised() -> (
    None
):
    table = moving()
    ended = table.finished("d", "r", 1, 1, "stop", 1.0)
    assert ended == [
        end("r", "stop"),
        AbortAttempt("d", "r", 1),
        AbortAttempt("d2", "r", 1),
    ]


@pytest.mark.parametrize(
    ("error", "next_one"),
    [(CapacityError("full"), "d2"), (LayoutError("no such plan"), "d3")],
)
def test_a_refused_sequence_decodes_on_and_asks_again(
    error: DisaggError, next_one: str
) -> None:
    """Who was full is asked once more, who said anything else is not."""
    table = leaving()
    join(table, "d3", 1.0)
    assert table.refused("d2", "r", 1, error, 1.0) == []
    assert table.token("d", "r", 1, 1, 8, 1.0) == [TokenOutput("r", 8)]
    moved = replace(at(job(length=100), 1, 7, 8), moved=3 + 2 + MOVE_TOKENS)
    assert table.tick(2.0) == [Reserve(next_one, moved)]
    table.refused(next_one, "r", 1, RequestError("nobody can"), 2.0)
    assert (table.requests["r"].phase, table.retries) == (Phase.DECODE, 0)


def test_a_sequence_that_decoded_on_while_room_was_slow_to_come_asks_for_more_of_it() -> (
    None
):
    table = leaving()
    for index in range(1, 15):
        table.token("d", "r", 1, index, 8, 1.0)
    more = replace(at(job(length=100), 1, 7, *[8] * 14), moved=3 + 15 + 2 * MOVE_TOKENS)
    assert table.on_grant("d2", "r", 1, GRANT) == [Reserve("d2", more)]
    for index in range(15, 15 + MOVE_TOKENS):
        table.token("d", "r", 1, index, 8, 1.0)
    assert table.on_grant("d2", "r", 1, GRANT) == [
        Start("d", more, Work.MOVE, "d2", GRANT)
    ]


def test_a_sequence_that_has_outgrown_its_room_decodes_on_and_asks_for_twice_as_much() -> (
    None
):
    table = moving()
    assert table.token("d", "r", 1, 1, 8, 1.0) == [TokenOutput("r", 8)]
    more = replace(at(job(length=100), 1, 7, 8), moved=3 + 2 + 2 * MOVE_TOKENS)
    assert table.refused("d", "r", 1, CapacityError("more"), 1.0) == [
        Reserve("d2", more)
    ]
    assert table.on_grant("d2", "r", 1, GRANT) == [
        Start("d", more, Work.MOVE, "d2", GRANT)
    ]
    assert (table.requests["r"].phase, table.retries) == (Phase.MOVE, 0)


def test_one_that_is_almost_done_ends_where_it_is() -> None:
    table = decoding(MOVE_TOKENS)
    join(table, "d2", 0.0)
    assert leave(table) == []


def test_room_that_comes_when_another_was_asked_since_is_given_back() -> None:
    table = leaving()
    table.worker_down("d2", 1.0)
    join(table, "d3", 1.0)
    assert table.on_grant("d2", "r", 1, GRANT) == [AbortAttempt("d2", "r", 1)]
    (start,) = room(table)
    assert isinstance(start, Start)
    assert (start.work, start.decode) == (Work.MOVE, "d3")


@pytest.mark.parametrize("broken", ["d", "d2"])
def test_a_move_that_breaks_starts_again_with_what_was_delivered(broken: str) -> None:
    table = moving(Role.PREFILL)
    join(table, "d3", 1.0)
    again = table.worker_down(broken, 1.0)
    survivors = {"d", "d2"} - {broken}
    assert set(only(AbortAttempt, again)) == {
        AbortAttempt(x, "r", 1) for x in {"p", *survivors}
    }
    (reserve,) = only(Reserve, again)
    assert (reserve.job.attempt, reserve.job.emitted, reserve.job.moved) == (
        2,
        token_array([7]),
        0,
    )


def left(giver: str) -> Rules:
    """All of "r" is handed over, by p its prompt or by d the sequence; then the giver leaves."""
    table = told("p") if giver == "p" else moving()
    leave(table, giver)
    assert table.worker_down(giver, 1.0) == []
    return table


@pytest.mark.parametrize(("giver", "taker"), [("p", "d"), ("d", "d2")])
def test_a_worker_that_left_before_the_other_spoke_costs_nothing(
    giver: str, taker: str
) -> None:
    table = left(giver)
    assert table.token(taker, "r", 1, 1, 8, 2.0) == [TokenOutput("r", 8)]
    assert table.tick(50.0) == []
    assert (table.moves, table.retries) == (giver == "d", 0)
    table.worker_down(taker, 50.0)
    assert table.retries == 1


@pytest.mark.parametrize(("giver", "taker"), [("p", "d"), ("d", "d2")])
def test_what_never_arrives_of_a_worker_that_left_is_computed_again(
    giver: str, taker: str
) -> None:
    table = left(giver)
    assert table.tick(1.0 + SPEAKS_S - 0.1) == []
    actions = table.tick(1.0 + SPEAKS_S) + join(table, f"{giver}3", 7.0)
    assert AbortAttempt(taker, "r", 1) in actions
    (reserve,) = only(Reserve, actions)
    assert (reserve.job.attempt, reserve.job.emitted, reserve.job.moved) == (
        2,
        token_array([7]),
        0,
    )


def test_an_error_of_who_takes_over_from_a_worker_that_left_blames_those_that_are_here() -> (
    None
):
    table = decoding()
    leave(table, "p", Role.DECODE)
    leave(table)
    table.on_grant("p", "r", 1, GRANT)
    table.worker_down("d", 1.0)
    assert table.refused("p", "r", 1, PeerLostError("no router"), 2.0) == [
        AbortAttempt("p", "r", 1)
    ]
    assert table.workers["p"].failures == 1


def test_a_prefill_worker_that_leaves_with_a_prompt_half_computed_is_not_waited_for() -> (
    None
):
    table = started("p", "d", "p2")
    leave(table, "p")
    assert only(Reserve, table.worker_down("p", 1.0))


def test_a_target_that_dies_before_it_promised_room_costs_nothing() -> None:
    table = leaving()
    assert table.worker_down("d2", 1.0) == []
    assert table.refused("d2", "r", 1, PeerLostError("gone"), 1.0) == []
    assert table.requests["r"].phase is Phase.DECODE
    assert [x.worker for x in only(Reserve, join(table, "d3", 2.0))] == ["d3"]


# -- who gets what
def test_a_prompt_starts_where_fewer_than_three_shorter_ones_are_before_it() -> None:
    table = house("p", "d")
    for rid, tokens in (
        ("long", 5000),
        ("a", 800),
        ("b", 900),
        ("e", 950),
        ("c", 999),
        ("d", 200),
    ):
        table.submit(job(rid, tokens), 0.0)
    waiting = [rid for rid, x in table.requests.items() if x.phase is Phase.QUEUED]
    assert waiting == ["c"]  # a, b and e are before it; d is before all, long was alone
    begin(table, "p", "d")  # computed
    assert table.requests["c"].phase is Phase.QUEUED
    begin(table, "p", "a")
    assert table.requests["c"].phase is Phase.RESERVE


@pytest.mark.parametrize(("step_tokens", "begun"), [(2048, 8), (1024, 4), (256, 3)])
def test_as_many_short_prompts_start_as_fill_a_step_at_once(
    step_tokens: int, begun: int
) -> None:
    table = house("d")
    table.worker_up(WorkerInfo("p", Role.PREFILL, "p", 1, step_tokens=step_tokens), 0.0)
    for number in range(12):
        table.submit(job(f"{number}", 256), 0.0)
    phases = [entry.phase for entry in table.requests.values()]
    assert phases == [Phase.RESERVE] * begun + [Phase.QUEUED] * (12 - begun)


def question(rid: str, number: int, shared: int = 640, own: int = 64) -> Job:
    """A prompt of a beginning that others have too, and of an end of its own."""
    prompt = (1,) * shared + (100 + number,) * own
    return Job(rid, 0, prompt, sampling={"max_tokens": 4}, deadline_s=100.0)


def computed(table: Rules, rid: str) -> None:
    """The prompt is done, and its answer too."""
    entry = table.requests[rid]
    assert entry.prefill
    assert entry.decode
    begin(table, entry.prefill, rid, 0.1)
    table.finished(entry.decode, rid, entry.job.attempt, 1, "stop", 0.2)


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    table = house("p", "p2", "d", "d2")
    for number in range(6):
        table.submit(question(f"{number}", number), 0.0)
        assert pairs(table, f"{number}") == [("p", "d")]
        computed(table, f"{number}")
    whys = ("prefill", "decode")
    assert [table.routed[why, "nobody_knows_it"] for why in whys] == [1, 1]
    assert [table.routed[why, "knows_most"] for why in whys] == [5, 5]
    table.worker_down("p", 1.0)  # what it knew dies with it
    join(table, "p", 1.0)
    table.submit(question("last", 7), 1.0)
    assert table.routed["prefill", "nobody_knows_it"] == 2


def test_a_known_beginning_counts_as_the_tokens_that_it_saves() -> None:
    table = house("p", "p2", "d")
    table.submit(question("first", 0), 0.0)
    computed(table, "first")
    table.submit(question("second", 1), 0.0)  # 64 tokens are left for p
    table.submit(question("third", 2), 0.0)  # 64 more, or 704 at p2
    table.submit(question("other", 3, shared=0, own=600), 0.0)
    assert pairs(table, "second", "third", "other") == [
        ("p", "d"),
        ("p", "d"),
        ("p2", "d"),
    ]
    table.submit(question("last", 4, own=1), 0.0)
    assert pairs(table, "last") == [("p", "d")]
    computed(table, "other")
    table.submit(job("long", 5000), 0.0)
    assert pairs(table, "long") == [("p2", "d")]
    for name in ("second", "third", "last"):
        computed(table, name)
    table.submit(question("more work", 5, shared=0, own=900), 0.0)
    assert pairs(table, "more work") == [("p", "d")]
    computed(table, "long")
    table.submit(question("fourth", 6), 0.0)  # behind 900 tokens it would not pay
    assert pairs(table, "fourth") == [("p2", "d")]
    assert table.routed["prefill", "has_less_to_do"] == 1


def test_pages_of_a_prompt_are_worth_some_sequences_and_no_more() -> None:
    table = house("p", "d", "d2")
    for number in range(6):
        table.submit(question(f"{number}", number, shared=6400), 0.0)
        begin(table, "p", f"{number}")
    assert [where for _, where in pairs(table, *map(str, range(6)))] == ["d"] * 4 + [
        "d2"
    ] * 2
    assert table.routed["decode", "has_less_to_do"] == 1


def test_short_prompts_stay_whole_where_they_decode() -> None:
    table = house("p")
    table.worker_up(WorkerInfo("d", Role.DECODE, "d", 1, min_tokens=100), 0.0)
    short, long = job("short", 99), job("long", 100)
    assert table.submit(short, 0.0) == [Start("d", at(short, 1), Work.LOCAL)]
    assert table.submit(long, 0.0) == [Reserve("d", at(long, 1))]
    single = job("single", 99, length=1)
    assert table.submit(single, 0.0) == [Start("d", at(single, 1), Work.LOCAL)]


def test_a_request_goes_to_the_workers_that_it_names_while_they_are_there() -> None:
    table = house("p1", "p2", "d1")
    table.worker_up(WorkerInfo("d2", Role.DECODE, "d2", 1, min_tokens=100), 0.0)
    pairs_asked = ("p2", "d2"), ("p1", "d2"), ("", "d1"), ("p2", "")
    for rid, at in zip("abce", pairs_asked, strict=True):
        table.submit(job(rid), 0.0, at)
    *both, third, fourth = pairs(table, *"abce")
    assert both == [("p2", "d2"), ("p1", "d2")]
    assert (third[1], fourth[0]) == ("d1", "p2")
    table.worker_down("d2", 1.0)
    assert pairs(table, "a", "b") == [("p2", "d1"), ("p1", "d1")]


def test_a_request_that_waits_for_its_worker_holds_up_nobody_else() -> None:
    table = house("p1", "p2", "d")
    for number in range(4):
        table.submit(job(f"{number}", 1000), 0.0, ("p1", "d"))
    assert table.requests["3"].phase is Phase.QUEUED
    table.submit(job("last", 2000), 0.0)
    assert pairs(table, "last") == [("p2", "d")]


def test_a_decode_worker_full_of_short_prompts_holds_no_long_one_up() -> None:
    table = house("p", "d2")
    table.worker_up(WorkerInfo("d", Role.DECODE, "d", 1, min_tokens=1000), 0.0)
    for number in range(4):
        table.submit(job(f"{number}", 999), 0.0)
    assert table.requests["3"].phase is Phase.QUEUED
    table.submit(job("long", 2000), 0.0)
    assert table.requests["long"].phase is Phase.RESERVE


def test_a_prompt_that_waits_long_for_prefill_holds_no_short_one_up() -> None:
    table = house("p")
    table.worker_up(WorkerInfo("d", Role.DECODE, "d", 1, min_tokens=300), 0.0)
    for number in range(4):
        table.submit(job(f"{number}", 8000), 0.0)
    table.submit(
        job("short", 299), 12.0
    )  # now the fourth has the less work to wait for
    phases = [entry.phase for entry in table.requests.values()]
    assert phases == [Phase.RESERVE] * 3 + [Phase.QUEUED, Phase.PREFILL]


def test_a_full_worker_is_asked_again_as_soon_as_it_says_that_it_has_more_room() -> (
    None
):
    table = house("p", "d")
    table.update_load("d", Load(100, 1), 0.0)
    table.submit(job(), 0.0)
    assert table.refused("d", "r", 1, CapacityError("full"), 0.0) == []
    assert table.update_load("d", Load(90, 1), 0.01) == []
    assert only(Reserve, table.update_load("d", Load(200, 1), 0.02))


def test_a_worker_without_slots_or_with_a_queue_is_not_asked() -> None:
    table = house("p", "d", "d2")
    table.update_load("d", Load(100, slots=0), 0.0)
    table.update_load("d2", Load(100, slots=3, waiting=1), 0.0)
    assert table.submit(job(), 0.0) == []
    assert only(Reserve, table.update_load("d2", Load(100, slots=3), 0.0))


def test_a_large_prompt_gets_in_though_small_ones_keep_coming() -> None:
    """When waiting has made up for its size, nothing smaller goes to the worker with most room."""
    table = house("p", "d")
    table.update_load("d", ROOM, 0.0)
    table.submit(job("large", 900), 0.0)
    table.refused("d", "large", 1, CapacityError("full"), 0.0)
    now = 0.0
    for i in range(30):
        now += 0.25
        (action,) = table.tick(now)
        assert isinstance(action, Reserve)
        table.refused("d", "large", action.job.attempt, CapacityError("full"), now)
        placed = only(Reserve, table.submit(job(f"s{i}", 10), now))
        assert bool(placed) == (900 * 2**-now > 10), now
        table.cancel(f"s{i}", now)


def test_what_a_prompt_takes_at_least_is_learned_from_hand_offs() -> None:
    table = started("p", "d", "d2")
    table.on_event(
        "p", TokenEvent("r", 1, 0, stats={"tokens": 10, "resident_bytes": 1000}), 0.0
    )
    table.update_load("d", Load(3000, 5), 0.0)
    table.update_load("d2", Load(1999, 5), 0.0)
    table.submit(job("other", 1), 0.0)  # keeps d2 from being idle
    assert pairs(table, "other") == [("p", "d2")]
    table.submit(job("large", 20), 0.0)
    assert pairs(table, "large") == [("p", "d")]


@pytest.mark.parametrize(("free_bytes", "is_placed"), [(2499, False), (2500, True)])
def test_the_states_of_a_prompt_need_room_besides(
    free_bytes: int, is_placed: bool
) -> None:
    table = started("p", "d")
    figures = {"tokens": 10, "resident_bytes": 1500, "state_bytes": 500}
    table.on_event("p", TokenEvent("r", 1, 0, stats=figures), 0.0)
    table.update_load("d", Load(free_bytes, 5), 0.0)

    placed = only(Reserve, table.submit(job("large", 20), 0.0))

    assert bool(placed) == is_placed


# -- failures
@pytest.mark.parametrize(
    "error", [RequestError("no"), ConfigError("no")], ids=lambda e: e.reason
)
def test_what_can_never_succeed_fails_at_once(error: DisaggError) -> None:
    assert FailRequest("r", error) in started().refused("p", "r", 1, error, 0.0)


def test_a_lasting_error_fails_after_three_attempts() -> None:
    table, error, now = started(), DisaggError("a bug"), 0.0
    for attempt in (1, 2):
        table.refused("p", "r", attempt, error, now)
        now += 1.0
        assert only(Reserve, table.tick(now))
    assert FailRequest("r", error) in table.refused("d", "r", 3, error, now)


@pytest.mark.parametrize(
    "error", [PeerLostError("x"), CapacityError("x")], ids=lambda e: e.reason
)
def test_what_may_pass_is_tried_until_the_deadline(error: DisaggError) -> None:
    table, now, failed = started(), 0.0, []
    while table.requests:
        entry = table.requests["r"]
        if entry.phase is Phase.RESERVE:
            room(table)
        table.refused("p", "r", entry.job.attempt, error, now)
        now += 0.5
        failed = table.tick(now)
    assert isinstance(failed[-1], FailRequest)
    assert isinstance(failed[-1].error, DeadlineError)
    assert table.retries > 5


def test_an_attempt_counts_as_retried_only_once_a_worker_could_begin_with_it() -> None:
    table, counted = house("p", "d", "p2", "p3"), []
    table.submit(job(), 0.0)
    for has_room in (False, True):
        if has_room:
            room(table)
        table.worker_down(table.requests["r"].prefill or "", 1.0)
        counted.append(table.retries)
    assert counted == [0, 1]


def test_a_refused_hand_off_goes_to_another_pair() -> None:
    """Twelve requests that the first pair refuses: each is refused there once."""
    table = house("p", "d", "p2", "d2")
    refused = 0
    for i in range(12):
        table.submit(job(f"r{i}"), float(i))
        entry = table.requests[f"r{i}"]
        room(table, f"r{i}")
        if entry.prefill == "p":
            refused += 1
            last = entry.workers
            table.refused("p", f"r{i}", 1, PeerLostError("no way"), float(i))
            table.tick(i + 0.5)
            assert not set(entry.workers) & set(last)
        table.cancel(f"r{i}", i + 0.9)
    assert refused


def test_a_worker_that_fails_fast_gets_ever_less() -> None:
    """Its breaker opens for 1, 2, 4 .. 30 s, and lets one request through each time."""
    table, now, tries = house("p", "d"), 0.0, list[float]()
    while now < 100.0:
        table.submit(job(f"r{now}"), now)
        for entry in list(table.requests.values()):
            if entry.phase is Phase.RESERVE:
                tries.append(now)
                room(table, entry.job.rid)
                error = PeerLostError("broken")
                table.refused("p", entry.job.rid, entry.job.attempt, error, now)
            table.cancel(entry.job.rid, now)
        now += 0.25
    assert tries == [0.0, 0.25, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 61.5, 91.5]


def test_requests_go_round_a_worker_that_fails_fast_and_health_says_when_all_do() -> (
    None
):
    table = house("p", "d", "p2")
    now = 0.0
    for i in range(4):
        table.submit(job(f"r{i}"), now)
        entry = table.requests[f"r{i}"]
        room(table, f"r{i}")
        if entry.prefill == "p":
            table.refused("p", f"r{i}", 1, DisaggError("a bug"), now)
        now += 0.01
    assert {
        x.prefill for x in table.requests.values() if x.phase is not Phase.QUEUED
    } == {"p2"}
    for _ in range(5):
        table.workers["p"].add_failure(now, now)
        assert table.ready(now)
    for _ in range(3):
        table.workers["p2"].add_failure(now, now)
    assert not table.ready(now)


def test_an_old_answer_that_goes_on_elsewhere_closes_no_breaker() -> None:
    table = told("p")
    for index in range(1, 4):
        table.token("d", "r", 1, index, 7, 0.1 * index)
        table.workers["p"].add_failure(0.1 * index, 0.1 * index)
    assert table.workers["p"].open_until > 0.3


def test_failures_of_attempts_that_were_on_their_way_together_count_once() -> None:
    table = house("p", "d", "p2", "d2", "p3", "d3")
    for i in range(30):
        table.submit(job(f"r{i}"), 0.0)
    lost = [rid for rid, entry in table.requests.items() if entry.decode == "d"]
    assert len(lost) > 1
    for rid in lost:
        table.refused("d", rid, 1, PeerLostError("gone"), 1.0)
    assert table.workers["d"].failures == 1


def test_a_request_that_fails_wherever_it_is_opens_no_breaker() -> None:
    table, now = house("p", "d"), 0.0
    table.submit(job(), now)
    while "r" in table.requests:
        attempt = table.requests["r"].job.attempt
        room(table)
        table.refused("p", "r", attempt, DisaggError("half a character"), now)
        now += 1.0
        table.tick(now)
    assert table.workers["p"].failures == 1


def test_health_says_when_requests_wait_and_none_gets_on() -> None:
    table = house("p", "d", silence_s=5.0)
    table.update_load("d", Load(100, slots=0), 0.0)
    table.submit(job(), 0.0)
    table.tick(4.0)
    assert table.ready(4.0)
    table.tick(6.0)
    assert not table.ready(6.0)
    table.update_load("d", ROOM, 7.0)
    assert table.ready(7.0)
    for i in range(9):  # more than can be started: those that compute get on
        table.submit(job(f"r{i}"), 7.0)
    table.tick(20.0)
    assert table.ready(20.0)


# -- deaths
def test_a_prefill_worker_that_dies_after_the_hand_off_is_not_missed() -> None:
    table = told("d")
    assert table.worker_down("p", 1.0) == []
    assert table.token("d", "r", 1, 1, 8, 1.0) == [TokenOutput("r", 8)]


def test_deaths_of_a_worker_that_computed_others_too_cost_nothing() -> None:
    table = started("p", "d")
    table.submit(job("other"), 0.0)
    for rid in ("r", "other"):
        begin(table, "d", rid)
    for i in range(2, 20):
        table.worker_down(f"d{i - 1}" if i > 2 else "d", float(i))
        join(table, f"d{i}", float(i))
        for rid in ("r", "other"):
            begin(table, f"d{i}", rid, float(i))
    assert [x.deaths for x in table.requests.values()] == [0, 0]


def test_a_request_that_killed_two_workers_runs_alone_and_is_refused_at_the_third() -> (
    None
):
    table = told("d")
    for i in (1, 2):
        table.worker_down(f"d{i}" if i > 1 else "d", 0.0)
        join(table, f"d{i + 1}", 0.0)
        if i == 1:
            begin(table, "d2")
    assert pairs(table, "r") == [("p", "d3")]
    assert table.submit(job("other"), 0.0) == []  # nothing beside it
    begin(table, "d3")
    assert table.tick(1.0) == []
    actions = table.worker_down("d3", 1.0)
    assert isinstance(actions[1], FailRequest)
    assert isinstance(actions[1].error, PeerLostError)
    assert only(Reserve, join(table, "d4", 1.0))  # and the other one goes on


def test_a_worker_that_left_as_it_said_was_not_killed_by_what_it_computed() -> None:
    table = started()
    begin(table, "d")
    for i in range(4):
        join(table, f"d{i}", float(i))
        leaving = table.requests["r"].decode
        assert leaving
        table.update_load(leaving, replace(ROOM, role=Role.NONE), float(i))
        table.worker_down(leaving, float(i))
        begin(table, f"d{i}", now=float(i))
    assert table.requests["r"].deaths == 0


def test_who_has_to_run_alone_waits_for_the_pair_that_is_soonest_empty() -> None:
    table = told("d")
    table.submit(job("new", 3000), 0.0)
    table.requests["new"].exclusive = True
    room(table, "new")
    table.refused("p", "new", 1, CapacityError("x"), 0.0)
    assert not only(Reserve, table.tick(0.5))  # r is there still
    assert (
        table.submit(job("third"), 0.5) == []
    )  # and nothing more comes between, short or not
    actions = table.finished("d", "r", 1, 1, "stop", 1.0)
    assert [x.job.rid for x in actions if isinstance(x, Reserve)] == ["new"]


def test_who_runs_alone_moves_when_another_worker_is_empty() -> None:
    table = decoding()
    table.requests["r"].exclusive = True
    join(table, "d2", 0.0)
    table.submit(job("s"), 0.0)
    room(table, "s")
    begin(table, "d2", "s")
    assert leave(table) == []
    actions = table.finished("d2", "s", 1, 1, "stop", 1.0)
    assert [(x.worker, x.job.rid) for x in only(Reserve, actions)] == [("d2", "r")]


# -- ends
def test_only_a_stream_that_gets_no_tokens_ends_by_its_deadline_on_both_sides() -> None:
    table = started(deadline_s=100.0)
    for i in range(50):
        now = 60.0 * i
        assert table.token("d", "r", 1, i, i, now) == [TokenOutput("r", i)]
        assert table.tick(now + 59.0) == []
    *forgotten, failed = table.tick(60.0 * 49 + 100.0)
    assert forgotten == [AbortAttempt("p", "r", 1), AbortAttempt("d", "r", 1)]
    assert isinstance(failed, FailRequest)
    assert isinstance(failed.error, DeadlineError)
