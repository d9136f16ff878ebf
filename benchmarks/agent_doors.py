"""Doors that serve HTTP, with clients that are agents, for `chaos --agents`.

    clients ─ HTTP ─► door ─ Unix socket ─► router

A door and its clients are in one process: where it is killed, its clients end too.
"""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.agent_answers import events_of, streamed_answer, whole_answer
from benchmarks.agent_mix import CUT, AgentAnswer, AgentRequest
from benchmarks.front_group import OWNER, Answers, DoorEnd
from disagg.bench.fake_workers import LOOPBACK
from disagg.bench.result import Row
from disagg.config import Config
from disagg.errors import DisaggError, PeerLostError
from disagg.server.door import Door
from disagg.server.service import bind

ANSWER_S = 300.0  # longest silence of a door
TEMPLATE = Path(__file__).parent.parent / "tests" / "clients" / "hermes.jinja"


class AgentDoorEnd(DoorEnd):
    """A door with HTTP, whose clients send an `AgentRequest` each, as the object of a `Child`."""

    async def start(self, config: Config, path: Path, number: int) -> None:
        """Serve on a free port of this host."""
        listening = bind(LOOPBACK, 0)
        door = Door(
            config,
            number,
            [listening],
            path=path,
            secret=OWNER,
            on_stop=lambda _: None,
        )
        is_serving = asyncio.Event()
        self._serving = asyncio.create_task(door.serve(is_serving.set))
        await is_serving.wait()
        port = listening.getsockname()[1]
        url = f"http://{LOOPBACK}:{port}"
        self._http = httpx.AsyncClient(base_url=url, timeout=ANSWER_S)

    async def answer(self, request: Any) -> AgentAnswer:
        """The whole answer; DisaggError for an error in its place, or in a stream."""
        try:
            if request.is_streamed:
                return await self._streamed(request)
            response = await self._http.post(request.path, json=request.body)
        except httpx.TransportError as error:
            raise PeerLostError(f"the connection broke: {error!r}") from error
        check_status(response)
        return whole_answer(request.path, response.json())

    async def _streamed(self, request: AgentRequest) -> AgentAnswer:
        events: list[Row] = []
        last = time.monotonic()
        streaming = self._http.stream("POST", request.path, json=request.body)
        async with streaming as response:
            if response.is_error:
                await response.aread()
            check_status(response)
            async for line in response.aiter_lines():
                for event in events_of([line]):
                    events.append(event)
                    last = self._note_gap(last)
        return streamed_answer(request.path, events)

    def count(self, answers: Answers, request: Any, answer: Any, expected: Any) -> None:
        """Count an answer by its kind: whether it is valid, and as expected."""
        is_cut = answer.finish_reason == CUT
        answers.outcomes[request.kind, "at token limit" if is_cut else "whole"] += 1
        mistake = request.mistake(answer)
        if mistake:
            answers.outcomes[request.kind, "invalid"] += 1
        if answer != expected:
            answers.outcomes[request.kind, "wrong"] += 1
            mistake = f"{asdict(answer)}; expected {asdict(expected)}; {mistake}"
        if mistake:
            answers.wrong += 1
            answers.mistakes.append(f"{request.body}: {mistake}")


def check_status(response: httpx.Response) -> None:
    """DisaggError if a response is an error."""
    if response.is_error:
        raise DisaggError(f"status {response.status_code}: {response.text}")
