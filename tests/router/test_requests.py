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
from disagg.router.actions import AbortAttempt, Action, EmitToken, Reserve, Start
from disagg.router.requests import MOVE_TOKENS, SPEAKS_S, Phase
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    TokenEvent,
    Work,
    WorkerInfo,
)
from tests.router.rules import Rules

GRANT = Grant(7, 1)
ROOM = Load(1 << 30, 10)


def job(rid: str = "r", tokens: int = 3, length: int = 4) -> Job:
    """Its prompt begins as no other does."""
    prompt = (sum(rid.encode()),) * tokens
    return Job(rid, 0, prompt, sampling={"max_tokens": length}, deadline_s=100.0)


def at(job: Job, attempt: int, *emitted: int, age_s: float = 0.0) -> Job:
    return replace(
        job, attempt=attempt, emitted=emitted, deadline_s=100.0 - age_s, waited_s=age_s
    )


def house(*names: str, **config: float) -> Rules:
    """Workers by name: p.. prefills, d.. decodes, b.. does both."""
    dispatch = Rules(RouterConfig(**({"deadline_s": 100.0} | config)))  # type: ignore[arg-type]
    for name in names:
        join(dispatch, name, 0.0)
    return dispatch


def join(dispatch: Rules, name: str, now: float) -> list[Action]:
    role = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}[name[0]]
    return dispatch.worker_up(WorkerInfo(name, role, name, 1), now)


def started(*names: str, **config: float) -> Rules:
    """Request "r" on its way from p to d."""
    dispatch = house(*(names or ("p", "d")), **config)
    assert dispatch.submit(job(), 0.0) == [Reserve("d", at(job(), 1))]
    assert room(dispatch) == [Start("p", at(job(), 1), Work.PREFILL, "d", GRANT)]
    return dispatch


def room(dispatch: Rules, rid: str = "r") -> list[Action]:
    """The decode worker that was asked last has room."""
    entry = dispatch.entries[rid]
    return dispatch.granted(entry.workers[-1], rid, entry.job.attempt, GRANT)


def begin(dispatch: Rules, worker: str, rid: str = "r", now: float = 0.0) -> None:
    """It gets its room, and this worker says its first token."""
    attempt = dispatch.entries[rid].job.attempt
    room(dispatch, rid)
    dispatch.token(worker, rid, attempt, 0, 7, now)


def pairs(dispatch: Rules, *rids: str) -> list[tuple[str | None, str | None]]:
    return [
        (dispatch.entries[rid].prefill, dispatch.entries[rid].decode) for rid in rids
    ]


def told(by: str) -> Rules:
    """Request "r", of which this worker has said token 7."""
    dispatch = started()
    assert dispatch.token(by, "r", 1, 0, 7, 0.0) == [EmitToken("r", 7)]
    return dispatch


def only(kind: type, actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


# -- tokens
def test_a_token_said_twice_is_delivered_once() -> None:
    dispatch = started()
    assert dispatch.token("p", "r", 1, 0, 7, 0.0) == [EmitToken("r", 7)]
    assert dispatch.token("d", "r", 1, 0, 7, 0.0) == []
    assert dispatch.unequal_tokens == 0
    assert dispatch.token("d", "r", 1, 0, 8, 0.0) == []
    assert dispatch.unequal_tokens == 1


def test_a_gap_starts_another_attempt_with_what_was_delivered() -> None:
    dispatch = told("d")
    assert set(dispatch.token("d", "r", 1, 2, 9, 0.0)) == {
        AbortAttempt("p", "r", 1),
        AbortAttempt("d", "r", 1),
    }
    assert dispatch.tick(0.05) == []
    assert dispatch.tick(0.1) == [Reserve("d", at(job(), 2, 7, age_s=0.1))]
    assert dispatch.known("d") == {"r": 1}


def test_an_end_that_counts_more_tokens_than_arrived_is_no_end() -> None:
    dispatch = told("d")
    assert not only(EmitToken, dispatch.finished("d", "r", 1, 2, "stop", 0.0))
    assert dispatch.entries["r"].phase is Phase.QUEUED


def test_an_answer_that_its_first_token_ends_leaves_the_decode_worker() -> None:
    dispatch = told("p")
    ended = [
        EmitToken("r", "stop"),
        AbortAttempt("p", "r", 1),
        AbortAttempt("d", "r", 1),
    ]
    assert dispatch.finished("p", "r", 1, 1, "stop", 0.0) == ended


def test_a_worker_that_talks_of_what_is_over_is_told_again_but_not_all_the_time() -> (
    None
):
    dispatch = started()
    assert dispatch.cancel("r", 0.0) == [
        AbortAttempt("p", "r", 1),
        AbortAttempt("d", "r", 1),
    ]
    said = [dispatch.token("d", "r", 1, i, 7, i / 10) for i in range(25)]
    assert [
        i for i, actions in enumerate(said) if actions == [AbortAttempt("d", "r", 1)]
    ] == [
        10,
        20,
    ]
    assert not any(actions for i, actions in enumerate(said) if i not in (10, 20))
    assert dispatch.cancel("r", 3.0) == []


def test_tokens_of_an_old_attempt_are_not_delivered() -> None:
    dispatch = started("p", "d", "p2")
    again = Reserve("d", at(job(), 2, age_s=1.0))
    assert dispatch.worker_down("p", 1.0) == [AbortAttempt("d", "r", 1), again]
    assert dispatch.token("d", "r", 1, 0, 7, 1.0) == []
    assert dispatch.finished("d", "r", 1, 0, "stop", 1.0) == []


def test_a_prefill_worker_that_never_heard_that_all_has_arrived_ends_no_answer() -> (
    None
):
    """The link broke after the commit; what the decode worker says proves that it came."""
    dispatch = started()
    dispatch.token("d", "r", 1, 0, 7, 0.0)
    lost = PeerLostError("no acknowledgement")
    assert dispatch.refused("p", "r", 1, lost, 5.0) == [AbortAttempt("p", "r", 1)]
    assert dispatch.token("d", "r", 1, 1, 8, 5.0) == [EmitToken("r", 8)]
    assert dispatch.retries == 0


# -- sequences that move
def decoding(length: int = 100) -> Rules:
    """Request "r" decodes at d: token 7 is known."""
    dispatch = house("p", "d")
    dispatch.submit(job(length=length), 0.0)
    begin(dispatch, "d")
    return dispatch


def leave(dispatch: Rules, name: str = "d", role: Role = Role.NONE) -> list[Action]:
    return dispatch.load(name, replace(ROOM, role=role), 1.0)


MOVED = replace(at(job(length=100), 1, 7), moved=3 + 1 + MOVE_TOKENS)


def leaving(role: Role = Role.NONE) -> Rules:
    """The same; d leaves, and d2 was asked for room."""
    dispatch = decoding()
    join(dispatch, "d2", 0.0)
    assert leave(dispatch, "d", role) == [Reserve("d2", MOVED)]
    return dispatch


def moving(role: Role = Role.NONE) -> Rules:
    """The same, on its way from d to d2."""
    dispatch = leaving(role)
    assert room(dispatch) == [Start("d", MOVED, Work.MOVE, "d2", GRANT)]
    return dispatch


@pytest.mark.parametrize("role", [Role.NONE, Role.PREFILL])
def test_a_worker_that_decodes_no_longer_gets_nothing_and_what_it_has_moves(
    role: Role,
) -> None:
    dispatch = decoding()
    assert leave(dispatch, "d", role) == []
    dispatch.submit(job("s"), 1.0)
    assert not dispatch.entries["s"].workers
    asked = only(Reserve, join(dispatch, "d2", 2.0))
    assert [(x.worker, x.job.rid) for x in asked] == [("d2", "r"), ("d2", "s")]


def test_both_workers_of_a_move_may_say_a_token_and_it_is_delivered_once() -> None:
    dispatch = moving()
    assert dispatch.token("d", "r", 1, 1, 8, 1.0) == [EmitToken("r", 8)]
    assert dispatch.entries["r"].phase is Phase.MOVE
    assert dispatch.token("d2", "r", 1, 1, 8, 1.0) == []
    assert dispatch.token("d2", "r", 1, 2, 9, 1.0) == [EmitToken("r", 9)]
    assert dispatch.token("d", "r", 1, 2, 9, 1.0) == []
    assert (dispatch.entries["r"].decode, dispatch.moves) == ("d2", 1)
    assert dispatch.worker_down("d", 2.0) == []
    ended = dispatch.finished("d2", "r", 1, 3, "stop", 2.0)
    assert ended == [EmitToken("r", "stop"), AbortAttempt("d2", "r", 1)]
    assert dispatch.unequal_tokens == dispatch.retries == 0


def test_an_answer_that_ends_before_it_has_moved_frees_the_room_that_it_was_promised() -> (
    None
):
    dispatch = moving()
    ended = dispatch.finished("d", "r", 1, 1, "stop", 1.0)
    assert ended == [
        EmitToken("r", "stop"),
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
    dispatch = leaving()
    join(dispatch, "d3", 1.0)
    assert dispatch.refused("d2", "r", 1, error, 1.0) == []
    assert dispatch.token("d", "r", 1, 1, 8, 1.0) == [EmitToken("r", 8)]
    moved = replace(at(job(length=100), 1, 7, 8), moved=3 + 2 + MOVE_TOKENS)
    assert dispatch.tick(2.0) == [Reserve(next_one, moved)]
    dispatch.refused(next_one, "r", 1, RequestError("nobody can"), 2.0)
    assert (dispatch.entries["r"].phase, dispatch.retries) == (Phase.DECODE, 0)


def test_a_sequence_that_decoded_on_while_room_was_slow_to_come_asks_for_more_of_it() -> (
    None
):
    dispatch = leaving()
    for index in range(1, 15):
        dispatch.token("d", "r", 1, index, 8, 1.0)
    more = replace(at(job(length=100), 1, 7, *[8] * 14), moved=3 + 15 + 2 * MOVE_TOKENS)
    assert dispatch.granted("d2", "r", 1, GRANT) == [Reserve("d2", more)]
    for index in range(15, 15 + MOVE_TOKENS):
        dispatch.token("d", "r", 1, index, 8, 1.0)
    assert dispatch.granted("d2", "r", 1, GRANT) == [
        Start("d", more, Work.MOVE, "d2", GRANT)
    ]


def test_a_sequence_that_has_outgrown_its_room_decodes_on_and_asks_for_twice_as_much() -> (
    None
):
    dispatch = moving()
    assert dispatch.token("d", "r", 1, 1, 8, 1.0) == [EmitToken("r", 8)]
    more = replace(at(job(length=100), 1, 7, 8), moved=3 + 2 + 2 * MOVE_TOKENS)
    assert dispatch.refused("d", "r", 1, CapacityError("more"), 1.0) == [
        Reserve("d2", more)
    ]
    assert dispatch.granted("d2", "r", 1, GRANT) == [
        Start("d", more, Work.MOVE, "d2", GRANT)
    ]
    assert (dispatch.entries["r"].phase, dispatch.retries) == (Phase.MOVE, 0)


def test_one_that_is_almost_done_ends_where_it_is() -> None:
    dispatch = decoding(MOVE_TOKENS)
    join(dispatch, "d2", 0.0)
    assert leave(dispatch) == []


def test_room_that_comes_when_another_was_asked_since_is_given_back() -> None:
    dispatch = leaving()
    dispatch.worker_down("d2", 1.0)
    join(dispatch, "d3", 1.0)
    assert dispatch.granted("d2", "r", 1, GRANT) == [AbortAttempt("d2", "r", 1)]
    (start,) = room(dispatch)
    assert isinstance(start, Start)
    assert (start.work, start.decode) == (Work.MOVE, "d3")


@pytest.mark.parametrize("broken", ["d", "d2"])
def test_a_move_that_breaks_starts_again_with_what_was_delivered(broken: str) -> None:
    dispatch = moving(Role.PREFILL)
    join(dispatch, "d3", 1.0)
    again = dispatch.worker_down(broken, 1.0)
    left = {"d", "d2"} - {broken}
    assert set(only(AbortAttempt, again)) == {
        AbortAttempt(x, "r", 1) for x in {"p", *left}
    }
    (asked,) = only(Reserve, again)
    assert (asked.job.attempt, asked.job.emitted, asked.job.moved) == (2, (7,), 0)


def left(giver: str) -> Rules:
    """All of "r" is handed over, by p its prompt or by d the sequence; then the giver leaves."""
    dispatch = told("p") if giver == "p" else moving()
    leave(dispatch, giver)
    assert dispatch.worker_down(giver, 1.0) == []
    return dispatch


@pytest.mark.parametrize(("giver", "taker"), [("p", "d"), ("d", "d2")])
def test_a_worker_that_left_before_the_other_spoke_costs_nothing(
    giver: str, taker: str
) -> None:
    dispatch = left(giver)
    assert dispatch.token(taker, "r", 1, 1, 8, 2.0) == [EmitToken("r", 8)]
    assert dispatch.tick(50.0) == []
    assert (dispatch.moves, dispatch.retries) == (giver == "d", 0)
    dispatch.worker_down(taker, 50.0)
    assert dispatch.retries == 1


@pytest.mark.parametrize(("giver", "taker"), [("p", "d"), ("d", "d2")])
def test_what_never_arrives_of_a_worker_that_left_is_computed_again(
    giver: str, taker: str
) -> None:
    dispatch = left(giver)
    assert dispatch.tick(1.0 + SPEAKS_S - 0.1) == []
    actions = dispatch.tick(1.0 + SPEAKS_S) + join(dispatch, f"{giver}3", 7.0)
    assert AbortAttempt(taker, "r", 1) in actions
    (asked,) = only(Reserve, actions)
    assert (asked.job.attempt, asked.job.emitted, asked.job.moved) == (2, (7,), 0)


def test_an_error_of_who_takes_over_from_a_worker_that_left_blames_those_that_are_here() -> (
    None
):
    dispatch = decoding()
    leave(dispatch, "p", Role.DECODE)
    leave(dispatch)
    dispatch.granted("p", "r", 1, GRANT)
    dispatch.worker_down("d", 1.0)
    assert dispatch.refused("p", "r", 1, PeerLostError("no router"), 2.0) == [
        AbortAttempt("p", "r", 1)
    ]
    assert dispatch.members["p"].failures == 1


def test_a_prefill_worker_that_leaves_with_a_prompt_half_computed_is_not_waited_for() -> (
    None
):
    dispatch = started("p", "d", "p2")
    leave(dispatch, "p")
    assert only(Reserve, dispatch.worker_down("p", 1.0))


def test_a_target_that_dies_before_it_promised_room_costs_nothing() -> None:
    dispatch = leaving()
    assert dispatch.worker_down("d2", 1.0) == []
    assert dispatch.refused("d2", "r", 1, PeerLostError("gone"), 1.0) == []
    assert dispatch.entries["r"].phase is Phase.DECODE
    assert [x.worker for x in only(Reserve, join(dispatch, "d3", 2.0))] == ["d3"]


# -- who gets what
def test_a_prompt_starts_where_fewer_than_three_shorter_ones_are_before_it() -> None:
    dispatch = house("p", "d")
    for rid, tokens in (
        ("long", 5000),
        ("a", 800),
        ("b", 900),
        ("e", 950),
        ("c", 999),
        ("d", 200),
    ):
        dispatch.submit(job(rid, tokens), 0.0)
    waiting = [rid for rid, x in dispatch.entries.items() if x.phase is Phase.QUEUED]
    assert waiting == ["c"]  # a, b and e are before it; d is before all, long was alone
    begin(dispatch, "p", "d")  # computed
    assert dispatch.entries["c"].phase is Phase.QUEUED
    begin(dispatch, "p", "a")
    assert dispatch.entries["c"].phase is Phase.RESERVE


@pytest.mark.parametrize(("step_tokens", "begun"), [(2048, 8), (1024, 4), (256, 3)])
def test_as_many_short_prompts_start_as_fill_a_step_at_once(
    step_tokens: int, begun: int
) -> None:
    dispatch = house("d")
    dispatch.worker_up(
        WorkerInfo("p", Role.PREFILL, "p", 1, step_tokens=step_tokens), 0.0
    )
    for number in range(12):
        dispatch.submit(job(f"{number}", 256), 0.0)
    phases = [entry.phase for entry in dispatch.entries.values()]
    assert phases == [Phase.RESERVE] * begun + [Phase.QUEUED] * (12 - begun)


def question(rid: str, number: int, shared: int = 640, own: int = 64) -> Job:
    """A prompt of a beginning that others have too, and of an end of its own."""
    prompt = (1,) * shared + (100 + number,) * own
    return Job(rid, 0, prompt, sampling={"max_tokens": 4}, deadline_s=100.0)


def computed(dispatch: Rules, rid: str) -> None:
    """The prompt is done, and its answer too."""
    entry = dispatch.entries[rid]
    assert entry.prefill
    assert entry.decode
    begin(dispatch, entry.prefill, rid, 0.1)
    dispatch.finished(entry.decode, rid, entry.job.attempt, 1, "stop", 0.2)


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    dispatch = house("p", "p2", "d", "d2")
    for number in range(6):
        dispatch.submit(question(f"{number}", number), 0.0)
        assert pairs(dispatch, f"{number}") == [("p", "d")]
        computed(dispatch, f"{number}")
    whys = ("prefill", "decode")
    assert [dispatch.routed[why, "nobody_knows_it"] for why in whys] == [1, 1]
    assert [dispatch.routed[why, "knows_most"] for why in whys] == [5, 5]
    dispatch.worker_down("p", 1.0)  # what it knew dies with it
    join(dispatch, "p", 1.0)
    dispatch.submit(question("last", 7), 1.0)
    assert dispatch.routed["prefill", "nobody_knows_it"] == 2


def test_a_known_beginning_counts_as_the_tokens_that_it_saves() -> None:
    dispatch = house("p", "p2", "d")
    dispatch.submit(question("first", 0), 0.0)
    computed(dispatch, "first")
    dispatch.submit(question("second", 1), 0.0)  # 64 tokens are left for p
    dispatch.submit(question("third", 2), 0.0)  # 64 more, or 704 at p2
    dispatch.submit(question("other", 3, shared=0, own=600), 0.0)
    assert pairs(dispatch, "second", "third", "other") == [
        ("p", "d"),
        ("p", "d"),
        ("p2", "d"),
    ]
    dispatch.submit(question("last", 4, own=1), 0.0)
    assert pairs(dispatch, "last") == [("p", "d")]
    computed(dispatch, "other")
    dispatch.submit(job("long", 5000), 0.0)
    assert pairs(dispatch, "long") == [("p2", "d")]
    for name in ("second", "third", "last"):
        computed(dispatch, name)
    dispatch.submit(question("more work", 5, shared=0, own=900), 0.0)
    assert pairs(dispatch, "more work") == [("p", "d")]
    computed(dispatch, "long")
    dispatch.submit(question("fourth", 6), 0.0)  # behind 900 tokens it would not pay
    assert pairs(dispatch, "fourth") == [("p2", "d")]
    assert dispatch.routed["prefill", "has_less_to_do"] == 1


def test_pages_of_a_prompt_are_worth_some_sequences_and_no_more() -> None:
    dispatch = house("p", "d", "d2")
    for number in range(6):
        dispatch.submit(question(f"{number}", number, shared=6400), 0.0)
        begin(dispatch, "p", f"{number}")
    assert [where for _, where in pairs(dispatch, *map(str, range(6)))] == ["d"] * 4 + [
        "d2"
    ] * 2
    assert dispatch.routed["decode", "has_less_to_do"] == 1


def test_short_prompts_stay_whole_where_they_decode() -> None:
    dispatch = house("p")
    dispatch.worker_up(WorkerInfo("d", Role.DECODE, "d", 1, min_tokens=100), 0.0)
    short, long = job("short", 99), job("long", 100)
    assert dispatch.submit(short, 0.0) == [Start("d", at(short, 1), Work.LOCAL)]
    assert dispatch.submit(long, 0.0) == [Reserve("d", at(long, 1))]
    single = job("single", 99, length=1)
    assert dispatch.submit(single, 0.0) == [Start("d", at(single, 1), Work.LOCAL)]


def test_a_request_goes_to_the_workers_that_it_names_while_they_are_there() -> None:
    dispatch = house("p1", "p2", "d1")
    dispatch.worker_up(WorkerInfo("d2", Role.DECODE, "d2", 1, min_tokens=100), 0.0)
    wanted = ("p2", "d2"), ("p1", "d2"), ("", "d1"), ("p2", "")
    for rid, at in zip("abce", wanted, strict=True):
        dispatch.submit(job(rid), 0.0, at)
    *both, third, fourth = pairs(dispatch, *"abce")
    assert both == [("p2", "d2"), ("p1", "d2")]
    assert (third[1], fourth[0]) == ("d1", "p2")
    dispatch.worker_down("d2", 1.0)
    assert pairs(dispatch, "a", "b") == [("p2", "d1"), ("p1", "d1")]


def test_a_request_that_waits_for_its_worker_holds_up_nobody_else() -> None:
    dispatch = house("p1", "p2", "d")
    for number in range(4):
        dispatch.submit(job(f"{number}", 1000), 0.0, ("p1", "d"))
    assert dispatch.entries["3"].phase is Phase.QUEUED
    dispatch.submit(job("last", 2000), 0.0)
    assert pairs(dispatch, "last") == [("p2", "d")]


def test_a_decode_worker_full_of_short_prompts_holds_no_long_one_up() -> None:
    dispatch = house("p", "d2")
    dispatch.worker_up(WorkerInfo("d", Role.DECODE, "d", 1, min_tokens=1000), 0.0)
    for number in range(4):
        dispatch.submit(job(f"{number}", 999), 0.0)
    assert dispatch.entries["3"].phase is Phase.QUEUED
    dispatch.submit(job("long", 2000), 0.0)
    assert dispatch.entries["long"].phase is Phase.RESERVE


def test_a_prompt_that_waits_long_for_prefill_holds_no_short_one_up() -> None:
    dispatch = house("p")
    dispatch.worker_up(WorkerInfo("d", Role.DECODE, "d", 1, min_tokens=300), 0.0)
    for number in range(4):
        dispatch.submit(job(f"{number}", 8000), 0.0)
    dispatch.submit(
        job("short", 299), 12.0
    )  # now the fourth has the less work to wait for
    phases = [entry.phase for entry in dispatch.entries.values()]
    assert phases == [Phase.RESERVE] * 3 + [Phase.QUEUED, Phase.PREFILL]


def test_a_full_worker_is_asked_again_as_soon_as_it_says_that_it_has_more_room() -> (
    None
):
    dispatch = house("p", "d")
    dispatch.load("d", Load(100, 1), 0.0)
    dispatch.submit(job(), 0.0)
    assert dispatch.refused("d", "r", 1, CapacityError("full"), 0.0) == []
    assert dispatch.load("d", Load(90, 1), 0.01) == []
    assert only(Reserve, dispatch.load("d", Load(200, 1), 0.02))


def test_a_worker_without_slots_or_with_a_queue_is_not_asked() -> None:
    dispatch = house("p", "d", "d2")
    dispatch.load("d", Load(100, slots=0), 0.0)
    dispatch.load("d2", Load(100, slots=3, waiting=1), 0.0)
    assert dispatch.submit(job(), 0.0) == []
    assert only(Reserve, dispatch.load("d2", Load(100, slots=3), 0.0))


def test_a_large_prompt_gets_in_though_small_ones_keep_coming() -> None:
    """When waiting has made up for its size, nothing smaller goes to the worker with most room."""
    dispatch = house("p", "d")
    dispatch.load("d", ROOM, 0.0)
    dispatch.submit(job("large", 900), 0.0)
    dispatch.refused("d", "large", 1, CapacityError("full"), 0.0)
    now = 0.0
    for i in range(30):
        now += 0.25
        (action,) = dispatch.tick(now)
        assert isinstance(action, Reserve)
        dispatch.refused("d", "large", action.job.attempt, CapacityError("full"), now)
        placed = only(Reserve, dispatch.submit(job(f"s{i}", 10), now))
        assert bool(placed) == (900 * 2**-now > 10), now
        dispatch.cancel(f"s{i}", now)


def test_what_a_prompt_takes_at_least_is_learned_from_hand_offs() -> None:
    dispatch = started("p", "d", "d2")
    dispatch.hear(
        "p", TokenEvent("r", 1, 0, stats={"tokens": 10, "resident_bytes": 1000}), 0.0
    )
    dispatch.load("d", Load(3000, 5), 0.0)
    dispatch.load("d2", Load(1999, 5), 0.0)
    dispatch.submit(job("other", 1), 0.0)  # keeps d2 from being idle
    assert pairs(dispatch, "other") == [("p", "d2")]
    dispatch.submit(job("large", 20), 0.0)
    assert pairs(dispatch, "large") == [("p", "d")]


# -- failures
@pytest.mark.parametrize(
    "error", [RequestError("no"), ConfigError("no")], ids=lambda e: e.reason
)
def test_what_can_never_succeed_fails_at_once(error: DisaggError) -> None:
    assert EmitToken("r", error) in started().refused("p", "r", 1, error, 0.0)


def test_a_lasting_disagreement_fails_after_three_attempts() -> None:
    dispatch, error, now = started(), LayoutError("another plan"), 0.0
    for attempt in (1, 2):
        dispatch.refused("p", "r", attempt, error, now)
        now += 1.0
        assert only(Reserve, dispatch.tick(now))
    assert EmitToken("r", error) in dispatch.refused("d", "r", 3, error, now)


@pytest.mark.parametrize(
    "error", [PeerLostError("x"), CapacityError("x")], ids=lambda e: e.reason
)
def test_what_may_pass_is_tried_until_the_deadline(error: DisaggError) -> None:
    dispatch, now, failed = started(), 0.0, []
    while dispatch.entries:
        entry = dispatch.entries["r"]
        if entry.phase is Phase.RESERVE:
            room(dispatch)
        dispatch.refused("p", "r", entry.job.attempt, error, now)
        now += 0.5
        failed = dispatch.tick(now)
    assert isinstance(failed[-1], EmitToken)
    assert isinstance(failed[-1].what, DeadlineError)
    assert dispatch.retries > 5


def test_an_attempt_counts_as_retried_only_once_a_worker_could_begin_with_it() -> None:
    dispatch, counted = house("p", "d", "p2", "p3"), []
    dispatch.submit(job(), 0.0)
    for has_room in (False, True):
        if has_room:
            room(dispatch)
        dispatch.worker_down(dispatch.entries["r"].prefill or "", 1.0)
        counted.append(dispatch.retries)
    assert counted == [0, 1]


def test_a_refused_hand_off_goes_to_another_pair() -> None:
    """Twelve requests that the first pair refuses: each is refused there once."""
    dispatch = house("p", "d", "p2", "d2")
    refused = 0
    for i in range(12):
        dispatch.submit(job(f"r{i}"), float(i))
        entry = dispatch.entries[f"r{i}"]
        room(dispatch, f"r{i}")
        if entry.prefill == "p":
            refused += 1
            last = entry.workers
            dispatch.refused("p", f"r{i}", 1, PeerLostError("no way"), float(i))
            dispatch.tick(i + 0.5)
            assert not set(entry.workers) & set(last)
        dispatch.cancel(f"r{i}", i + 0.9)
    assert refused


def test_a_worker_that_fails_fast_gets_ever_less() -> None:
    """Its breaker opens for 1, 2, 4 .. 30 s, and lets one request through each time."""
    dispatch, now, tries = house("p", "d"), 0.0, list[float]()
    while now < 100.0:
        dispatch.submit(job(f"r{now}"), now)
        for entry in list(dispatch.entries.values()):
            if entry.phase is Phase.RESERVE:
                tries.append(now)
                room(dispatch, entry.job.rid)
                error = PeerLostError("broken")
                dispatch.refused("p", entry.job.rid, entry.job.attempt, error, now)
            dispatch.cancel(entry.job.rid, now)
        now += 0.25
    assert tries == [0.0, 0.25, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 61.5, 91.5]


def test_requests_go_round_a_worker_that_fails_fast_and_health_says_when_all_do() -> (
    None
):
    dispatch = house("p", "d", "p2")
    now = 0.0
    for i in range(4):
        dispatch.submit(job(f"r{i}"), now)
        entry = dispatch.entries[f"r{i}"]
        room(dispatch, f"r{i}")
        if entry.prefill == "p":
            dispatch.refused("p", f"r{i}", 1, DisaggError("a bug"), now)
        now += 0.01
    assert {
        x.prefill for x in dispatch.entries.values() if x.phase is not Phase.QUEUED
    } == {"p2"}
    for _ in range(5):
        dispatch.members["p"].fails(now, now)
        assert dispatch.ready(now)
    for _ in range(3):
        dispatch.members["p2"].fails(now, now)
    assert not dispatch.ready(now)


def test_an_old_answer_that_goes_on_elsewhere_closes_no_breaker() -> None:
    dispatch = told("p")
    for index in range(1, 4):
        dispatch.token("d", "r", 1, index, 7, 0.1 * index)
        dispatch.members["p"].fails(0.1 * index, 0.1 * index)
    assert dispatch.members["p"].open_until > 0.3


def test_failures_of_attempts_that_were_on_their_way_together_count_once() -> None:
    dispatch = house("p", "d", "p2", "d2", "p3", "d3")
    for i in range(30):
        dispatch.submit(job(f"r{i}"), 0.0)
    lost = [rid for rid, entry in dispatch.entries.items() if entry.decode == "d"]
    assert len(lost) > 1
    for rid in lost:
        dispatch.refused("d", rid, 1, PeerLostError("gone"), 1.0)
    assert dispatch.members["d"].failures == 1


def test_a_request_that_fails_wherever_it_is_opens_no_breaker() -> None:
    dispatch, now = house("p", "d"), 0.0
    dispatch.submit(job(), now)
    while "r" in dispatch.entries:
        attempt = dispatch.entries["r"].job.attempt
        room(dispatch)
        dispatch.refused("p", "r", attempt, DisaggError("half a character"), now)
        now += 1.0
        dispatch.tick(now)
    assert dispatch.members["p"].failures == 1


def test_health_says_when_requests_wait_and_none_gets_on() -> None:
    dispatch = house("p", "d", silence_s=5.0)
    dispatch.load("d", Load(100, slots=0), 0.0)
    dispatch.submit(job(), 0.0)
    dispatch.tick(4.0)
    assert dispatch.ready(4.0)
    dispatch.tick(6.0)
    assert not dispatch.ready(6.0)
    dispatch.load("d", ROOM, 7.0)
    assert dispatch.ready(7.0)
    for i in range(9):  # more than can be started: those that compute get on
        dispatch.submit(job(f"r{i}"), 7.0)
    dispatch.tick(20.0)
    assert dispatch.ready(20.0)


# -- deaths
def test_a_prefill_worker_that_dies_after_the_hand_off_is_not_missed() -> None:
    dispatch = told("d")
    assert dispatch.worker_down("p", 1.0) == []
    assert dispatch.token("d", "r", 1, 1, 8, 1.0) == [EmitToken("r", 8)]


def test_deaths_of_a_worker_that_computed_others_too_cost_nothing() -> None:
    dispatch = started("p", "d")
    dispatch.submit(job("other"), 0.0)
    for rid in ("r", "other"):
        begin(dispatch, "d", rid)
    for i in range(2, 20):
        dispatch.worker_down(f"d{i - 1}" if i > 2 else "d", float(i))
        join(dispatch, f"d{i}", float(i))
        for rid in ("r", "other"):
            begin(dispatch, f"d{i}", rid, float(i))
    assert [x.deaths for x in dispatch.entries.values()] == [0, 0]


def test_a_request_that_killed_two_workers_runs_alone_and_is_refused_at_the_third() -> (
    None
):
    dispatch = told("d")
    for i in (1, 2):
        dispatch.worker_down(f"d{i}" if i > 1 else "d", 0.0)
        join(dispatch, f"d{i + 1}", 0.0)
        if i == 1:
            begin(dispatch, "d2")
    assert pairs(dispatch, "r") == [("p", "d3")]
    assert dispatch.submit(job("other"), 0.0) == []  # nothing beside it
    begin(dispatch, "d3")
    assert dispatch.tick(1.0) == []
    actions = dispatch.worker_down("d3", 1.0)
    assert isinstance(actions[1], EmitToken)
    assert isinstance(actions[1].what, PeerLostError)
    assert only(Reserve, join(dispatch, "d4", 1.0))  # and the other one goes on


def test_a_worker_that_left_as_it_said_was_not_killed_by_what_it_computed() -> None:
    dispatch = started()
    begin(dispatch, "d")
    for i in range(4):
        join(dispatch, f"d{i}", float(i))
        leaving = dispatch.entries["r"].decode
        assert leaving
        dispatch.load(leaving, replace(ROOM, role=Role.NONE), float(i))
        dispatch.worker_down(leaving, float(i))
        begin(dispatch, f"d{i}", now=float(i))
    assert dispatch.entries["r"].deaths == 0


def test_who_has_to_run_alone_waits_for_the_pair_that_is_soonest_empty() -> None:
    dispatch = told("d")
    dispatch.submit(job("new", 3000), 0.0)
    dispatch.entries["new"].alone = True
    room(dispatch, "new")
    dispatch.refused("p", "new", 1, CapacityError("x"), 0.0)
    assert not only(Reserve, dispatch.tick(0.5))  # r is there still
    assert (
        dispatch.submit(job("third"), 0.5) == []
    )  # and nothing more comes between, short or not
    actions = dispatch.finished("d", "r", 1, 1, "stop", 1.0)
    assert [x.job.rid for x in actions if isinstance(x, Reserve)] == ["new"]


def test_who_runs_alone_moves_when_another_worker_is_empty() -> None:
    dispatch = decoding()
    dispatch.entries["r"].alone = True
    join(dispatch, "d2", 0.0)
    dispatch.submit(job("s"), 0.0)
    room(dispatch, "s")
    begin(dispatch, "d2", "s")
    assert leave(dispatch) == []
    actions = dispatch.finished("d2", "s", 1, 1, "stop", 1.0)
    assert [(x.worker, x.job.rid) for x in only(Reserve, actions)] == [("d2", "r")]


# -- ends
def test_only_a_stream_that_gets_no_tokens_ends_by_its_deadline_on_both_sides() -> None:
    dispatch = started(deadline_s=100.0)
    for i in range(50):
        now = 60.0 * i
        assert dispatch.token("d", "r", 1, i, i, now) == [EmitToken("r", i)]
        assert dispatch.tick(now + 59.0) == []
    *forgotten, end = dispatch.tick(60.0 * 49 + 100.0)
    assert forgotten == [AbortAttempt("p", "r", 1), AbortAttempt("d", "r", 1)]
    assert isinstance(end, EmitToken)
    assert isinstance(end.what, DeadlineError)
