"""A client and the application."""

import asyncio
import json
import re
from typing import Any

import httpx
from starlette.types import ASGIApp


def post(app: ASGIApp, raises: bool = True, **fields: Any) -> httpx.Response:
    return send(app, "POST", "/v1/completions", raises, json=ask(**fields))


def chat(app: ASGIApp, **fields: Any) -> httpx.Response:
    """The answer to one chat request: "hi" of a user, unless it says otherwise."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 4} | fields
    return send(app, "POST", "/v1/chat/completions", json=body)


def respond(app: ASGIApp, **fields: Any) -> httpx.Response:
    """The answer to one request to /v1/responses: "hi", unless it says otherwise."""
    body = {"input": "hi", "max_output_tokens": 4} | fields
    return send(app, "POST", "/v1/responses", json=body)


def get(app: ASGIApp, path: str) -> httpx.Response:
    return send(app, "GET", path)


def send(
    app: ASGIApp, method: str, path: str, raises: bool = True, **what: Any
) -> httpx.Response:
    """The answer to one request. raises: what nobody expected ends the test."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=raises)
        async with (
            asyncio.timeout(30),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            return await client.request(method, path, **what)

    return asyncio.run(run())


def figures_of(text: str) -> dict[str, float]:
    """Prometheus figures by series and labels, except the model and the role "router"."""
    figures = {}
    for name, labels, value in re.findall(r"^([\w:]+)(?:{(.*)})? (\S+)$", text, re.M):
        shown = [
            label
            for label in labels.replace('"', "").split(",")
            if label not in ("", "role=router") and not label.startswith("model_name=")
        ]
        key = f"{name}{{{','.join(shown)}}}" if shown else name
        figures[key] = float(value)
    return figures


def assert_counted(app: ASGIApp, expected: dict[str, float]) -> dict[str, float]:
    """All figures, after a check of the expected ones."""
    figures = figures_of(get(app, "/metrics").text)
    assert {name: figures.get(name) for name in expected} == expected
    return figures


def refused(
    response: httpx.Response, status: int, reason: str, param: str | None = None
) -> str:
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
