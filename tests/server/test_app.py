"""HTTP as clients see it: bodies, events, statuses, and what a client that leaves takes along."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from disagg.errors import CapacityError, ConfigError, DisaggError, PeerLostError
from disagg.server.completions import Completions
from disagg.workers.lifecycle import Action
from tests.server.visits import STATS_OF_A_PROMPT, ask, events, visit
from tests.workers.fakes import Network, until


def test_a_completion_has_the_shape_that_clients_know(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        body = (await client.post("/v1/completions", json=ask())).json()
        assert body["object"] == "text_completion"
        assert body["model"] == "tiny"
        choice = {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}
        assert body["choices"] == [choice]
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            3,
            4,
            7,
        )
        assert "kv" not in body

    visit(app, completions, network, scene)


def test_the_figures_of_the_hand_off_come_when_they_are_asked_for(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        whole = (await client.post("/v1/completions", json=ask(kv=True))).json()
        assert whole["kv"] == STATS_OF_A_PROMPT
        streamed = await client.post("/v1/completions", json=ask(kv=True, stream=True))
        assert [event.get("kv") for event in events(streamed.text)][-1] == STATS_OF_A_PROMPT

    visit(app, completions, network, scene)


def test_a_stream_says_every_token_then_the_usage_then_done(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/completions", json=ask(**options))
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, usage = events(response.text)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "c", "d", ""]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4
        assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
        assert all("usage" not in chunk for chunk in chunks)

    visit(app, completions, network, scene)


def test_token_ids_are_a_prompt_too(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        await client.post("/v1/completions", json=ask(prompt=[5, 6, 7], codec="kivi", seed=9))
        submit = network.workers["p"].submitted[0]
        assert (submit.prompt, submit.codec) == ((5, 6, 7), "kivi")
        assert submit.sampling["seed"] == 9

    visit(app, completions, network, scene)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_frees_the_workers(
    stream: bool, app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        network.workers["d"].pause_at = 4
        body = ask(max_tokens=9, stop=["zz", "cd"], stream=stream)
        response = await client.post("/v1/completions", json=body)
        chunks = events(response.text) if stream else [response.json()]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == "ab"
        assert choices[-1]["finish_reason"] == "stop"
        await until(lambda: bool(network.workers["d"].aborted))
        assert completions.router.running == 0

    visit(app, completions, network, scene)


def test_an_answer_that_a_stop_string_ends_has_the_figures_of_its_hand_off(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        body = ask(max_tokens=9, stop="ab", kv=True)
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["kv"]["wire_bytes"] == STATS_OF_A_PROMPT["wire_bytes"]

    visit(app, completions, network, scene)


def test_the_body_counts_and_not_its_content_type(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
        body = json.dumps(ask())
        answer = await client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 200
        broken = await client.post("/v1/completions", content="prompt=abc", headers=headers)
        assert broken.status_code == 400
        assert "JSON" in broken.json()["error"]["message"]

    visit(app, completions, network, scene)


@pytest.mark.parametrize(
    ("fields", "status", "reason", "says"),
    [
        ({"prompt": ""}, 400, "request", "empty"),
        ({"prompt": []}, 400, "request", "empty"),
        ({"prompt": "x" * 20}, 400, "prompt_too_long", "at most 19"),
        ({"prompt": [200]}, 400, "request", "not below 200"),
        ({"prompt": [[1], [2]]}, 400, "request", "prompt"),
        ({"max_tokens": 0}, 400, "request", "max_tokens"),
        ({"max_tokens": "many"}, 400, "request", "max_tokens"),
        ({"model": "gpt-4"}, 404, "model", "'tiny' is"),
        ({"n": 2}, 400, "request", "n=2"),
        ({"echo": True}, 400, "request", "echo=True"),
    ],
    ids=lambda value: str(value)[:24] if isinstance(value, dict) else None,
)
def test_a_request_that_cannot_be_gets_its_status_and_reason(
    fields: dict[str, Any],
    status: int,
    reason: str,
    says: str,
    app: FastAPI,
    completions: Completions,
    network: Network,
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            response = await client.post("/v1/completions", json=ask(**fields, stream=stream))
            assert response.status_code == status
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == (reason, status)
            assert says in error["message"]

    visit(app, completions, network, scene)


@pytest.mark.parametrize("stream", [False, True])
def test_what_workers_refuse_has_a_status_of_its_own(
    stream: bool, app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        network.workers["p"].refuses = ConfigError("unknown codec 'zip'")
        response = await client.post("/v1/completions", json=ask(stream=stream))
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "config"

    visit(app, completions, network, scene)


def test_an_error_in_mid_stream_is_an_event(
    app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        decode = network.workers["d"]
        decode.pause_at = 2
        body = ask(max_tokens=9, stream=True)
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await decode.paused.wait()
        await completions.router.close()
        *_, last = events((await asking).text)
        assert last["error"]["type"] == "peer_lost"

    visit(app, completions, network, scene)


def test_unknown_fields_are_ignored_with_a_warning(
    app: FastAPI, completions: Completions, network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        body = ask(flavour="mint", user="me", n=1)
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    with caplog.at_level(logging.WARNING):
        visit(app, completions, network, scene)
    assert "'flavour'" in caplog.text
    assert "'user'" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_both_sides(
    stream: bool, app: FastAPI, completions: Completions, network: Network
) -> None:
    """Spoken to as a web server would, because the client library cannot leave in the middle."""
    sent: list[Any] = []
    left = asyncio.Event()

    async def scene(client: httpx.AsyncClient) -> None:
        decode = network.workers["d"]
        decode.pause_at = 2
        body = json.dumps(ask(max_tokens=9, stream=stream)).encode()
        arrived = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in arrived:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        serving = asyncio.create_task(app(SCOPE, receive, send))  # type: ignore[arg-type]
        await decode.paused.wait()
        left.set()
        await asyncio.wait([serving])
        await until(lambda: bool(decode.aborted and network.workers["p"].aborted))
        assert not decode.jobs
        assert completions.router.running == 0

    visit(app, completions, network, scene)


SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}


@pytest.mark.parametrize(
    ("error", "status"), [(CapacityError("full"), 503), (PeerLostError("gone"), 503)]
)
def test_come_back_later_says_when(
    error: DisaggError, status: int, app: FastAPI, completions: Completions, network: Network
) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        def refuse(*args: object) -> list[Action]:
            raise error

        completions.router.dispatch.submit = refuse  # type: ignore[method-assign,assignment]
        response = await client.post("/v1/completions", json=ask())
        assert response.status_code == status
        assert response.headers["retry-after"] == "1"

    visit(app, completions, network, scene)
