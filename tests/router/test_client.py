"""A door and its router on a socket: every token once, whichever of the two goes away."""

import asyncio

import pytest

from disagg.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    PeerLostError,
    QueueFullError,
    StoppingError,
)
from disagg.protos.v1 import router_pb2 as pb
from disagg.router.client import RouterClient, fixed
from disagg.router.door_service import ROUTER_SERVICE
from disagg.transfer.rpc import Link, connect, failures_of
from tests.router.fakes import (
    FIGURES,
    SECRET,
    RouterProcess,
    answer_of,
    attached,
    door_at,
    following,
    serving,
)
from tests.transfer.peer import until
from tests.worker.pairs import collect, leave

PROMPT = (3, 1, 4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "router"


def begin(
    client: RouterClient,
    tokens: list[int] | None = None,
    max_tokens: int = 20,
    **params: int,
):
    """An answer that is being read into `tokens`."""
    outputs = client.generate(PROMPT, {"max_tokens": max_tokens} | params, "raw")
    return asyncio.create_task(collect(outputs, tokens))


async def test_a_door_gets_every_token_the_figures_and_the_end(path):
    async with serving(path), door_at(path) as client:
        tokens, end = await begin(client)

    assert tokens == answer_of(PROMPT, 20)
    assert end.finish_reason == "length"
    assert end.kv == FIGURES


async def test_a_prediction_goes_through_the_router_to_each_worker(path):
    async with serving(path) as process, door_at(path) as client:
        process.worker.go.clear()
        outputs = client.generate(PROMPT, {"max_tokens": 9}, "raw", prediction=[5, 6])
        answering = asyncio.create_task(collect(outputs))
        await until(lambda: process.worker.jobs)

        (request,) = process.router.table.requests.values()

        assert [*request.job.prediction] == [5, 6]
        await leave(answering)


async def test_log_probabilities_come_with_their_tokens(path):
    async with serving(path), door_at(path) as client:
        outputs = client.generate(PROMPT, {"max_tokens": 5, "logprobs": 1}, "raw")
        scores = [output.logprobs async for output in outputs if output.token]

    first = answer_of(PROMPT, 5)
    assert scores == [[[-float(i), [[first[i], -float(i)]]]] for i in range(5)]


async def test_answers_side_by_side_are_not_mixed_up(path):
    async with serving(path), door_at(path) as client:
        answers = await asyncio.gather(*(begin(client, seed=i) for i in range(30)))

    for seed, (tokens, _) in enumerate(answers):
        assert tokens == answer_of(PROMPT, 20, seed)


async def test_a_refused_request_ends_with_the_error_of_the_router(path):
    process = RouterProcess(path, max_queue=1)
    await process.start()
    async with door_at(path) as client:
        waiting = begin(client)
        await until(lambda: process.router.waiting == 1)
        with pytest.raises(QueueFullError, match="1 requests wait, 1 may"):
            await begin(client)
        await leave(waiting)
    await process.die()


async def test_a_client_that_leaves_ends_the_work_at_the_worker(path):
    async with serving(path) as process, door_at(path) as client:
        answering = begin(client, max_tokens=10**6)
        await until(lambda: process.worker.jobs)

        await leave(answering)

        await until(lambda: not process.worker.jobs)
        assert process.router.running == client.running == 0


async def test_the_requests_of_a_dead_door_are_cancelled_and_no_others(path):
    async with serving(path) as process, door_at(path, "1") as survivor:
        tokens: list[int] = []
        answering = begin(survivor, tokens, max_tokens=300)
        async with door_at(path, "0") as client:
            lost = [begin(client, max_tokens=10**6) for _ in range(3)]
            await until(lambda: len(process.worker.jobs) == 4)

        await until(lambda: len(process.worker.jobs) == 1)

        await answering
        assert tokens == answer_of(PROMPT, 300)
        assert process.router.running == 0
        for each in lost:
            await leave(each)


async def test_an_answer_goes_on_at_the_next_router_with_the_next_token(path):
    async with door_at(path) as client:
        async with serving(path):
            tokens: list[int] = []
            answering = begin(client, tokens, max_tokens=400, seed=5)
            await until(lambda: len(tokens) > 10)
        num_before = len(tokens)
        assert not answering.done()
        async with serving(path) as process:
            _, end = await answering

    assert tokens == answer_of(PROMPT, 400, seed=5)
    assert end.finish_reason == "length"
    (job,) = process.worker.submitted
    assert [*job.emitted] == tokens[: len(job.emitted)]
    assert len(job.emitted) >= num_before
    assert job.sampling["seed"] == 5


async def test_an_answer_whose_end_was_lost_gets_it_from_the_next_router(path):
    async with door_at(path) as client:
        async with serving(path) as process:
            process.worker.go.clear()
            tokens: list[int] = []
            answering = begin(client, tokens, max_tokens=1)
            handle = await first_handle(client)
            client._prompts[handle].accepted = True
            client._prompts[handle].emitted.append(answer_of(PROMPT, 1)[0])
        async with serving(path):
            _, end = await answering

    assert end.finish_reason == "length"
    assert tokens == []


async def first_handle(client: RouterClient) -> int:
    await until(lambda: client._prompts)
    return next(iter(client._prompts))


async def test_a_resumed_answer_is_not_refused_by_a_full_queue(path):
    async with door_at(path, max_queue=100) as client:
        async with serving(path):
            answers = [begin(client, max_tokens=500, seed=i) for i in range(5)]
            await until(lambda: client.ready)
        process = RouterProcess(path, max_queue=1)
        await process.start()
        await until(lambda: process.router.waiting == 5)
        process.add_worker()
        done = await asyncio.gather(*answers)
        await process.die()

    for seed, (tokens, _) in enumerate(done):
        assert tokens == answer_of(PROMPT, 500, seed)


async def test_a_resumed_answer_keeps_the_codec_that_was_chosen_for_it(path):
    async with door_at(path) as client:
        async with serving(path) as process:
            choose_codec(process, "int8")
            tokens: list[int] = []
            outputs = client.generate(PROMPT, {"max_tokens": 400}, "auto")
            answering = asyncio.create_task(collect(outputs, tokens))
            await until(lambda: len(tokens) > 3)
        async with serving(path) as process:
            choose_codec(process, "fp8")
            await answering

    assert process.worker.submitted[0].codec == "int8"


def choose_codec(process: RouterProcess, codec: str) -> None:
    """In place of the rule: the codec of every request with codec auto."""

    def choose(*facts, **limits):
        return codec, "chosen by the test"

    process.router.table.codec_policy.choose = choose


async def test_a_new_request_waits_for_a_router_that_is_not_there_yet(path):
    async with door_at(path) as client:
        answering = begin(client)
        await asyncio.sleep(0)
        assert not client.ready
        assert client.lacks({}) == "router 0 of 1, 1 requests wait"

        async with serving(path):
            tokens, _ = await answering

    assert tokens == answer_of(PROMPT, 20)


async def test_no_more_wait_for_a_missing_router_than_may_wait_at_one(path):
    async with door_at(path, max_queue=2) as client:
        waiting = [begin(client), begin(client)]
        await until(lambda: client.running == 2)

        with pytest.raises(QueueFullError, match="2 requests wait for a router"):
            await begin(client)

        for each in waiting:
            await leave(each)


async def test_no_more_wait_while_a_router_leaves_than_while_there_is_none(path):
    """It lets what it has end, and refuses the rest, which waits for the next one."""
    async with serving(path) as process, door_at(path, max_queue=2) as client:
        process.worker.go.clear()
        answers = [begin(client)]
        await until(lambda: process.worker.submitted)
        closing = asyncio.create_task(process.router.close(grace_s=30))
        await asyncio.sleep(0)
        answers.append(begin(client))
        await until(lambda: client.lacks({}).startswith("router 0 of 1"))

        with pytest.raises(QueueFullError, match="2 requests wait for a router"):
            await begin(client)

        closing.cancel()
        for each in answers:
            await leave(each)


async def test_what_a_leaving_router_refused_fails_at_its_deadline(path):
    async with serving(path) as process, door_at(path, deadline_s=1.0) as client:
        process.worker.go.clear()
        answering = begin(client)
        await until(lambda: process.worker.submitted)
        closing = asyncio.create_task(process.router.close(grace_s=30))
        await asyncio.sleep(0)

        with pytest.raises(DeadlineError, match="no router runs"):
            await begin(client)

        closing.cancel()
        await leave(answering)


async def test_what_came_and_left_without_a_router_leaves_nothing(path):
    async with door_at(path) as client:
        for _ in range(3):
            waiting = begin(client)
            await until(lambda: client.running == 1)
            await leave(waiting)

        assert client.running == 0
        assert not client._begins
        assert not client._cancels


async def test_a_request_without_a_router_fails_at_its_deadline(path):
    async with door_at(path, deadline_s=0.01) as client:
        with pytest.raises(DeadlineError, match="no router runs"):
            await begin(client)

    assert client.running == 0


async def test_a_router_that_leaves_hands_its_requests_to_the_next(path):
    """Its clients see no StoppingError: only the door's own end may end them."""
    async with door_at(path) as client:
        async with serving(path) as process:
            tokens: list[int] = []
            answering = begin(client, tokens, max_tokens=400)
            await until(lambda: len(tokens) > 3)
            await process.router.close()
        async with serving(path):
            await answering

    assert tokens == answer_of(PROMPT, 400)


async def test_an_answer_goes_on_at_a_router_with_another_address(tmp_path):
    links: dict[str, Link] = {}
    addresses = [tmp_path / "first"]

    async def dial() -> Link:
        address = f"unix:{addresses[-1]}"
        if address not in links:
            links[address] = connect(address, SECRET)
        return links[address]

    async with following(dial) as client:
        async with serving(addresses[0]):
            tokens: list[int] = []
            answering = begin(client, tokens, max_tokens=400)
            await until(lambda: len(tokens) > 3)
        addresses.append(tmp_path / "second")
        async with serving(addresses[1]):
            await answering

    assert tokens == answer_of(PROMPT, 400)


async def test_what_waits_ends_once_no_router_will_come(path):
    link = connect(f"unix:{path}", SECRET)
    is_over = False

    async def dial() -> Link:
        if is_over:
            raise StoppingError("the application is deleted")
        return link

    async with following(dial) as client:
        async with serving(path) as process:
            answering = begin(client, max_tokens=10**6)
            await until(lambda: process.worker.jobs)
        is_over = True

        with pytest.raises(StoppingError, match="deleted"):
            await answering
        with pytest.raises(StoppingError, match="deleted"):
            await begin(client)

    assert client.running == 0


async def test_a_call_before_a_router_was_dialled_is_refused(path):
    client = RouterClient(fixed(connect(f"unix:{path}", SECRET)))

    with pytest.raises(PeerLostError, match="not known yet"):
        await client.report()


async def test_a_door_that_leaves_is_reported_to_the_host_of_the_router(path):
    async with serving(path) as process:
        async with door_at(path, "0") as client:
            await attached(client)
        await until(lambda: process.host.departures)

    assert process.host.departures == ["0"]


async def test_a_door_that_stops_ends_its_answers_and_takes_no_new_ones(path):
    async with serving(path) as process, door_at(path) as client:
        answering = begin(client, max_tokens=10**6)
        await until(lambda: process.worker.jobs)

        await client.close()

        with pytest.raises(StoppingError):
            await answering
        with pytest.raises(StoppingError):
            await begin(client)
        await until(lambda: not process.worker.jobs)


async def test_a_door_that_stops_lets_short_answers_end(path):
    async with serving(path) as process, door_at(path) as client:
        answering = begin(client, max_tokens=50)
        await until(lambda: process.worker.jobs)

        await client.close(grace_s=30)

        tokens, _ = await answering
        assert tokens == answer_of(PROMPT, 50)


async def test_a_door_that_reads_nothing_costs_bounded_memory(path):
    async with serving(path, max_behind=1000) as process:
        link = connect(f"unix:{path}", SECRET)
        method = link.channel.stream_stream(f"/{ROUTER_SERVICE}/Generate")
        stream = method(metadata=link.metadata)
        begins = [
            pb.Begin(handle=i, prompt=PROMPT, sampling='{"max_tokens": 1000000}')
            for i in range(500)
        ]
        await stream.write(pb.GenerateRequest(begins=begins).SerializeToString())
        await until(lambda: len(process.worker.jobs) == 500)

        await until(lambda: process.router.running == 0)

        with pytest.raises(CapacityError, match="at most 1000 wait"):
            await read_all(stream)
        await link.close()


async def read_all(stream) -> None:
    with failures_of("router"):
        async for _ in stream:
            pass


async def test_answers_of_a_door_that_fell_behind_fail_with_the_reason(path):
    async with serving(path, max_behind=10), door_at(path) as client:
        with pytest.raises(CapacityError, match="at most 10 wait"):
            await asyncio.gather(*(begin(client, seed=i) for i in range(30)))

        tokens, _ = await begin(client, max_tokens=2)

    assert tokens == answer_of(PROMPT, 2)


async def test_calls_of_the_owner_reach_the_process_of_the_router(path):
    async with serving(path) as process, door_at(path) as client:
        await attached(client)
        await client.scale(2, None)
        await client.drain("both-0")

    assert process.host.calls == [("scale", 2, None), ("drain", "both-0")]


async def test_a_report_names_every_worker_and_the_requests(path):
    async with serving(path), door_at(path) as client:
        await attached(client)
        report = await client.report()

    assert report.summary["requests"] == 0
    assert report.workers == [
        {
            "name": "both-0",
            "role": "both",
            "address": "here:1",
            "epoch": 1,
            "gauges": {"jobs": 0.0},
            "pid": 1,
        }
    ]


async def test_a_scrape_of_one_door_has_the_counts_of_all(path):
    async with serving(path), door_at(path, "0") as first, door_at(path, "1") as second:
        await attached(first)
        await attached(second)
        await first.scrape()
        assert await second.scrape() == b"1 1 "


async def test_the_counts_of_a_door_arrive_though_nobody_scrapes_it(path):
    async with serving(path) as process, door_at(path, "7"):
        await until(lambda: process.host.counts)

    assert process.host.counts == {"7": b"1 "}


async def test_a_door_without_the_secret_is_refused(path):
    async with serving(path):
        link = connect(f"unix:{path}")
        with pytest.raises(ConfigError, match="token is missing or wrong"):
            await link.call(f"/{ROUTER_SERVICE}/Report", b"", 10)
        await link.close()


async def test_a_report_without_a_router_says_so(path):
    async with door_at(path) as client:
        with pytest.raises(PeerLostError):
            await client.report()
