"""The order of the queue: clients take turns, each in its own order."""

from hypothesis import given
from hypothesis import strategies as st

from disagg.router.request_queue import RequestQueue
from disagg.router.request_state import RequestState
from disagg.transfer.messages import Job

CLIENTS = "abc"
LONGEST = 32  # tokens of a prompt that finds room
# None: the first request begins; else a request of a client, with a prompt of a length
EVENTS = st.lists(
    st.none() | st.tuples(st.sampled_from(CLIENTS), st.integers(1, 64)), max_size=40
)


def request(client: str, serial: int, tokens: int = 1) -> RequestState:
    job = Job(f"{client}{serial}", 0, (1,) * tokens)
    return RequestState(
        job, serial=serial, arrived=float(serial), deadline=1e9, client=client
    )


def queue_of(*requests: RequestState) -> RequestQueue:
    queue = RequestQueue()
    for each in requests:
        queue.add(each)
    return queue


def start(queue: RequestQueue, request: RequestState) -> RequestState:
    """It gets its room."""
    queue.start(request)
    queue.end_turn(request)
    return request


def start_first(queue: RequestQueue) -> RequestState:
    return start(queue, next(iter(queue)))


def start_all(queue: RequestQueue) -> list[str]:
    """In the order in which they begin one by one."""
    return [start_first(queue).rid for _ in range(len(queue))]


def play(events: list[tuple[str, int] | None]) -> list[tuple[RequestState, set[str]]]:
    """Each request that began, and the clients with one that could begin then."""
    queue = RequestQueue()
    begun = []
    for serial, event in enumerate(events):
        if event is not None:
            client, tokens = event
            queue.add(request(client, serial, tokens))
            continue
        fitting = [each for each in queue if each.num_prompt_tokens <= LONGEST]
        if fitting:
            waiting = {each.client for each in fitting}
            begun.append((start(queue, fitting[0]), waiting))
    return begun


def test_a_client_with_one_request_waits_for_no_flood():
    flood = [request("a", serial) for serial in range(100)]
    queue = queue_of(*flood)
    start_first(queue)
    queue.add(request("b", 100))

    assert start_first(queue).client == "b"


def test_one_pass_takes_turns_as_single_starts_do():
    requests = [request("a", serial) for serial in range(4)]
    requests += [request("b", serial) for serial in range(4, 6)]
    queue = queue_of(*requests)
    start(queue, requests[0])

    in_one_pass = [start(queue, each).rid for each in queue]

    assert in_one_pass == ["b4", "a1", "b5", "a2", "a3"]


@given(EVENTS)
def test_no_client_begins_three_while_another_waits(events):
    """So that whoever waits has its turn after at most two of every other client."""
    begun_since = {client: dict.fromkeys(CLIENTS, 0) for client in CLIENTS}
    for first, waiting in play(events):
        for client in CLIENTS:
            if client == first.client or client not in waiting:
                begun_since[client] = dict.fromkeys(CLIENTS, 0)
            else:
                begun_since[client][first.client] += 1
                assert begun_since[client][first.client] <= 2


@given(EVENTS)
def test_the_requests_of_a_client_begin_in_its_order(events):
    """Of those that waited together, the lowest rank first."""
    queue = RequestQueue()
    for serial, event in enumerate(events):
        if event is not None:
            client, tokens = event
            queue.add(request(client, serial, tokens))
        elif queue:
            waiting = list(queue)
            first = start_first(queue)
            own = [each for each in waiting if each.client == first.client]
            assert first.rank == min(each.rank for each in own)


@given(st.lists(st.integers(1, 64), max_size=40))
def test_one_client_alone_goes_by_rank(lengths):
    requests = [request("", serial, tokens) for serial, tokens in enumerate(lengths)]
    queue = queue_of(*requests)
    by_rank = sorted(requests, key=lambda each: (each.rank, each.serial))

    assert [each.rid for each in queue] == [each.rid for each in by_rank]
    assert start_all(queue) == [each.rid for each in by_rank]


def test_a_request_with_a_kept_worker_goes_by_rank():
    """Its client has had its turn, but others that are less urgent get none of its room."""
    long, short = request("a", 0, tokens=64), request("a", 1)
    queue = queue_of(long, short, request("b", 2), request("b", 90))
    start(queue, short)
    long.has_kept_worker = True

    assert [each.rid for each in queue] == ["b2", "a0", "b90"]


def start_where_one_fits(queue: RequestQueue) -> str:
    """All ask for room in order, and only the first gets any."""
    asked = []
    for each in queue:
        queue.start(each)
        asked.append(each)
    first, *others = asked
    queue.end_turn(first)
    for each in others:
        queue.give_back(each)
        queue.add(each)
    return first.rid


def test_a_request_that_finds_no_room_costs_no_turn():
    queue = queue_of(*[request("a", serial) for serial in range(5)], request("b", 5))

    begun = [start_where_one_fits(queue) for _ in range(6)]

    assert begun == ["a0", "b5", "a1", "a2", "a3", "a4"]


def test_requests_without_room_do_not_delay_a_short_one_of_their_client():
    queue = queue_of(*[request("a", serial, tokens=64) for serial in range(9)])
    queue.add(request("a", 9))
    begun = []

    for serial in range(10, 13):
        queue.add(request("b", serial))
        first = next(each for each in queue if each.num_prompt_tokens == 1)
        begun.append(start(queue, first).rid)

    assert "a9" in begun


def test_who_could_not_begin_for_long_saves_no_turns_up():
    """Its requests did not fit while another client had many turns."""
    queue = queue_of(request("b", 0))
    for serial in range(1, 9):
        queue.add(request("a", serial))
    for each in [x for x in queue if x.client == "a"][:5]:
        start(queue, each)
    for serial in range(9, 12):
        queue.add(request("b", serial))

    assert start_all(queue) == ["b0", "a6", "b9", "a7", "b10", "a8", "b11"]


def test_late_refusals_bring_no_passed_turns_back():
    """Requests of a wait long for an answer, while b has more turns than they took."""
    queue = queue_of(*[request("a", serial) for serial in range(8)])
    slow = list(queue)
    for each in slow:
        queue.start(each)
    for serial in range(8, 18):
        queue.add(request("b", serial))
        start_first(queue)
    for serial in range(18, 26):
        queue.add(request("a", serial))
        queue.add(request("b", serial))
    begun = []

    for each in slow:
        begun.append(start_first(queue).client)
        queue.give_back(each)

    assert "".join(begun) == "abababab"


def test_who_runs_alone_comes_before_all_turns():
    alone = request("a", 5)
    alone.exclusive = True
    queue = queue_of(request("a", 0), request("b", 1), alone)

    assert next(iter(queue)) is alone


def test_the_queue_knows_who_waits():
    queue = queue_of(request("a", 0), request("a", 1), request("b", 2))

    start_first(queue)
    queue.discard(request("b", 2))

    assert queue.waiting == {"a": 1}
    assert len(queue) == 1
