"""A door over HTTP, its router on a socket: what clients see while either of them goes away."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.config import Config
from disagg.server.door import Door
from disagg.server.service import bind
from tests.router.fakes import SECRET, serving
from tests.transfer.peer import until

PROMPT = [3, 1, 4]
OWNER = {"Authorization": f"Bearer {SECRET.token}"}


@dataclass
class OpenDoor:
    """A door, a client of it, and the task that serves."""

    door: Door
    http: httpx.AsyncClient
    serving: asyncio.Task[None]
    stops: list[str]

    async def ready(self) -> None:
        async with asyncio.timeout(30):
            while (await self.http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": 5} | fields
        response = await self.http.post("/v1/completions", json=body)
        return response.json()

    def stream(self, **fields: Any) -> Any:
        body = {"prompt": PROMPT, "stream": True, "logprobs": 0} | fields
        return self.http.stream("POST", "/v1/completions", json=body)


@asynccontextmanager
async def opened(path: Path, config: Config | None = None) -> AsyncIterator[OpenDoor]:
    """A door of the default model."""
    listening = bind("127.0.0.1", 0)
    stops: list[str] = []
    door = Door(
        config or Config(),
        number=0,
        sockets=[listening],
        path=path,
        secret=SECRET.token,
        on_stop=lambda now: stops.append("now" if now else "stop"),
    )
    started = asyncio.Event()
    task = asyncio.create_task(door.serve(started.set))
    await asyncio.wait(
        [task, asyncio.create_task(started.wait())],
        return_when=asyncio.FIRST_COMPLETED,
    )
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        yield OpenDoor(door, http, task, stops)
        door.end(0)
        await task


async def tokens_of(lines: AsyncIterator[str], texts: list[str]) -> list[str]:
    """The tokens of a stream, as their texts."""
    async for line in lines:
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                texts += (choice["logprobs"] or {"tokens": []})["tokens"]
    return texts


async def whole(door: OpenDoor, max_tokens: int) -> list[str]:
    """The tokens of an answer that nothing disturbs."""
    answer = await door.complete(max_tokens=max_tokens, seed=1, logprobs=0)
    return answer["choices"][0]["logprobs"]["tokens"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "router"


async def test_a_door_answers_from_its_router(path):
    async with serving(path), opened(path) as door:
        await door.ready()
        answer = await door.complete()

    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_door_without_a_router_is_not_ready_and_says_why(path):
    async with opened(path) as door:
        response = await door.http.get("/ready")

    assert response.status_code == 503
    assert response.json() == {
        "status": "starting",
        "lacks": "router 0 of 1, 0 requests wait",
    }


async def test_any_door_shows_the_status_of_all_workers(path):
    async with serving(path), opened(path) as door:
        await door.ready()
        status = (await door.http.get("/status", headers=OWNER)).json()

    assert [worker["name"] for worker in status["workers"]] == ["both-0"]
    assert status["wanted"] == {"both": 1}


async def test_the_counts_of_a_door_reach_the_process_that_is_scraped(path):
    async with serving(path) as process, opened(path) as door:
        await door.ready()
        await door.complete()
        await door.http.get("/metrics")

    families = {
        name: samples for name, _, _, samples in json.loads(process.host.counts["0"])
    }
    (total,) = (
        value
        for name, _, value in families["vllm:generation_tokens"]
        if name.endswith("_total")
    )
    assert total == 5


async def test_the_owner_scales_and_stops_through_any_door(path):
    async with serving(path) as process, opened(path) as door:
        await door.ready()
        scaled = await door.http.post("/scale", json={"decode": 3}, headers=OWNER)
        stopped = await door.http.post("/stop", headers=OWNER)

    assert (scaled.status_code, stopped.status_code) == (200, 200)
    assert process.host.calls == [("scale", None, 3)]
    assert door.stops == ["stop"]


async def test_a_stream_survives_its_router_token_by_token(path):
    texts: list[str] = []
    async with opened(path) as door:
        async with serving(path):
            await door.ready()
            expected = await whole(door, 300)
            stream = door.stream(max_tokens=300, seed=1)
            response = await stream.__aenter__()
            reading = asyncio.create_task(tokens_of(response.aiter_lines(), texts))
            await until(lambda: len(texts) > 5)
        assert not reading.done()
        async with serving(path):
            await reading
        await stream.__aexit__(None, None, None)

    assert texts == expected


async def test_a_door_that_leaves_ends_its_streams_first(path):
    texts: list[str] = []
    async with serving(path), opened(path) as door:
        await door.ready()
        expected = await whole(door, 200)
        async with door.stream(max_tokens=200, seed=1) as response:
            reading = asyncio.create_task(tokens_of(response.aiter_lines(), texts))
            await until(lambda: texts)
            door.door.end()
            await reading
        await door.serving

    assert texts == expected


async def test_a_door_that_leaves_takes_no_new_connection(path):
    async with serving(path), opened(path) as door:
        await door.ready()
        async with door.stream(max_tokens=10**4, ignore_eos=True):
            door.door.end()
            await until(lambda: not listens(door))
            door.door.end(0)
        await door.serving


def listens(door: OpenDoor) -> bool:
    try:
        url = door.http.base_url
        socket.create_connection((url.host, url.port), 1).close()
    except OSError:
        return False
    return True


async def test_a_door_that_leaves_closes_connections_after_their_answer(path):
    """So that a client which keeps its connection goes to another door."""
    async with serving(path) as process, opened(path) as door:
        await door.ready()
        process.worker.go.clear()
        answering = asyncio.create_task(
            door.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
        )
        await until(lambda: process.worker.jobs)
        door.door.end()
        await asyncio.sleep(0.05)
        process.worker.go.set()
        response = await answering
        await door.serving

    assert response.status_code == 200
    assert response.headers["connection"] == "close"


async def test_a_door_refuses_requests_while_its_streams_end_and_then(path):
    """When it has none, other doors of the service may have some, and clients come to all."""
    idle = asyncio.Event()
    async with serving(path) as process, opened(path) as door:
        await door.ready()
        process.worker.go.clear()
        async with door.stream(max_tokens=3) as response:
            await until(lambda: process.worker.jobs)
            door.door.refuse(3600.0, idle.set)
            ready = await door.http.get("/ready")
            health = await door.http.get("/health")
            while (refused := await short(door)).status_code == 200:
                await asyncio.sleep(0.01)
            process.worker.go.set()
            texts = await tokens_of(response.aiter_lines(), [])
        await idle.wait()
        later = await short(door)

    assert len(texts) == 3
    assert later.status_code == 503
    assert (ready.status_code, health.status_code) == (503, 200)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["connection"] == "close"


async def short(door: OpenDoor) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 1}
    return await door.http.post("/v1/completions", json=body)


async def test_the_time_of_streams_can_be_cut(path):
    idle = asyncio.Event()
    async with serving(path), opened(path) as door:
        await door.ready()
        async with door.stream(max_tokens=10**4, ignore_eos=True) as response:
            lines = response.aiter_lines()
            await anext(lines)
            door.door.refuse(3600.0, idle.set)
            door.door.refuse(0.0, idle.set)
            *_, last, done = [line async for line in lines if line]
        await idle.wait()

    assert '"stopping"' in last
    assert done == "data: [DONE]"


@pytest.mark.parametrize(("body", "order"), [({}, "stop"), ({"now": True}, "now")])
async def test_the_owner_says_whether_requests_get_time_to_end(body, order, path):
    async with serving(path), opened(path) as door:
        await door.ready()
        await door.http.post("/stop", headers=OWNER, json=body)

    assert door.stops == [order]


async def test_an_id_of_a_request_gets_to_its_worker_and_into_the_status(path):
    async with serving(path) as process, opened(path) as door:
        await door.ready()
        process.worker.go.clear()
        headers = {"X-Request-Id": "order-7"}
        body = {"prompt": PROMPT, "max_tokens": 3}
        both = [
            asyncio.create_task(
                door.http.post("/v1/completions", json=body, headers=headers)
            )
            for _ in range(2)
        ]
        await until(lambda: len(process.worker.jobs) == 2)
        status = (await door.http.get("/status")).json()
        process.worker.go.set()
        answers = [await each for each in both]

    jobs = process.worker.submitted
    assert [request["id"] for request in status["running"]] == ["order-7"] * 2
    assert {answer.status_code for answer in answers} == {200}
    assert len({job.rid for job in jobs}) == 2
    assert all("order-7" in job.name for job in jobs)


async def test_after_the_grace_a_stream_ends_with_an_error(path):
    async with serving(path), opened(path) as door:
        await door.ready()
        async with door.stream(max_tokens=10**4, ignore_eos=True) as response:
            lines = response.aiter_lines()
            await anext(lines)
            door.door.end(0.1)
            received = [line async for line in lines if line]
        await door.serving

    assert (
        json.loads(received[-2].removeprefix("data: "))["error"]["type"] == "stopping"
    )
    assert received[-1] == "data: [DONE]"
