"""Scenes: a client and the application, with a pair of fakes behind it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from fastapi import FastAPI

from disagg.server.completions import Completions
from tests.workers.fakes import Network

Scene = Callable[[httpx.AsyncClient], Awaitable[None]]
STATS_OF_A_PROMPT = {
    "codec": "raw",
    "tokens": 3,
    "fp16_bytes": 40,
    "fp8_bytes": 20,
    "wire_bytes": 10,
    "resident_bytes": 8,
    "encode_ms": 1.0,
    "wire_ms": 2.0,
    "exposed_ms": 0.5,
    "admit_ms": 0.1,
}


def visit(app: FastAPI, completions: Completions, network: Network, scene: Scene) -> None:
    """Run a scene against the application, with a pair of fakes behind it."""

    async def run() -> None:
        prefill, decode = network.pair()
        for worker in (prefill, decode):
            completions.router.add(worker.peer)
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        try:
            async with (
                asyncio.timeout(30),
                httpx.AsyncClient(transport=transport, base_url="http://test") as client,
            ):
                await scene(client)
        finally:
            await completions.router.close()

    asyncio.run(run())


def ask(**fields: Any) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 4, **fields}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
