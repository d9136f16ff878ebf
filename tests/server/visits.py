"""A client and the application."""

import asyncio
import json
from typing import Any

import httpx
from starlette.types import ASGIApp


def post(app: ASGIApp, raises: bool = True, **fields: Any) -> httpx.Response:
    """The answer to one completion request."""
    return send(app, "POST", "/v1/completions", raises, json=ask(**fields))


def chat(app: ASGIApp, **fields: Any) -> httpx.Response:
    """The answer to one chat request: "hi" of a user, unless it says otherwise."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 4} | fields
    return send(app, "POST", "/v1/chat/completions", json=body)


def get(app: ASGIApp, path: str) -> httpx.Response:
    return send(app, "GET", path)


def send(app: ASGIApp, method: str, path: str, raises: bool = True, **what: Any) -> httpx.Response:
    """The answer to one request. raises: what nobody expected ends the test."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=raises)
        async with (
            asyncio.timeout(30),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            return await client.request(method, path, **what)

    return asyncio.run(run())


def assert_counted(app: ASGIApp, *lines: str) -> str:
    """What Prometheus reads, all of these lines among it."""
    text = get(app, "/metrics").text
    for line in lines:
        assert line in text
    return text


def refused(response: httpx.Response, status: int, reason: str, param: str | None = None) -> str:
    """The message of an error, which is of this kind and about this field."""
    error = response.json()["error"]
    message = error.pop("message")
    assert error == {"type": reason, "param": param, "code": status}
    assert response.status_code == status
    return str(message)


def ask(**fields: Any) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 4, **fields}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
