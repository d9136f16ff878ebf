"""Clients of a front end that is measured: raw sockets, as cheap as they can be.

Streams take the time that each token was on its way from the stamp that its text is. Everything
else is one request on one connection.
"""

import asyncio
import json
import resource
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from disagg.bench.fake_workers import LOOPBACK, Stamps, load_stamps
from disagg.bench.result import Row, p99

COMPLETIONS = "/v1/completions"
FIRST_TOKEN = 100  # of prompts of ids
NUM_TOKENS = 3000
POLL_S = 0.05
HEALTH_PAUSE_S = 0.005
ANSWER_S = 120.0  # for a request
CONNECT_S = 2.0  # for a new connection to be answered
SLEEPY_PAUSE_S = 5.0  # between two bytes of a sleepy connection
SLEEPY_BEGIN = b"GET /health HTTP/1.1\r\nX: "
EVENT = b"data: "
DONE = b"[DONE]"


@dataclass(frozen=True)
class TokenFigures:
    """What all streams got in one window of time.

    token_p99_s: how long a token was on its way, from its worker to the client
    longest_gap_s: between two tokens of a stream, or since the last one
    """

    tokens: int
    seconds: float
    token_p99_s: float
    longest_gap_s: float


@dataclass(frozen=True)
class HttpAnswer:
    """An answer, or status 0 for none. `seconds`: until its end."""

    status: int
    seconds: float
    body: bytes = b""


def prompt_of_ids(tokens: int, number: int = 0) -> list[int]:
    """Token ids of a prompt of this length; prompts of other numbers begin differently."""
    first = FIRST_TOKEN + number % NUM_TOKENS
    return [first, *(FIRST_TOKEN + token % NUM_TOKENS for token in range(tokens - 1))]


def streamed(prompt: Sequence[int], tokens: int) -> Row:
    """The body of a streamed completion."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }


def encode_request(method: str, path: str, data: bytes = b"") -> bytes:
    """A request whose connection is closed after the answer."""
    head = [
        f"{method} {path} HTTP/1.1",
        f"Host: {LOOPBACK}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


class Window:
    """Tokens of all streams since the last reading."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.began_at = time.monotonic()
        self.tokens = 0
        self.ages_s = array("f")
        self.longest_gap_s = 0.0

    def read(self, streams: Sequence["StreamClient"]) -> TokenFigures:
        """The figures until now."""
        now = time.monotonic()
        gaps_s = [now - max(x.heard_at, self.began_at) for x in streams if not x.ended]
        return TokenFigures(
            self.tokens,
            seconds=now - self.began_at,
            token_p99_s=p99(self.ages_s) if self.ages_s else 0.0,
            longest_gap_s=max([self.longest_gap_s, *gaps_s]),
        )


class StreamClient(asyncio.Protocol):
    """One streamed answer. `heard_at`: when its last token arrived, or when it began."""

    def __init__(self, request: bytes, window: Window, stamps: Stamps):
        self.heard_at = time.monotonic()
        self.num_tokens = 0
        self.ended = False
        self.status = 0
        self._request = request
        self._window = window
        self._stamps = stamps
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(EVENT):
                self._on_event(line.removeprefix(EVENT))
            elif line.startswith(b"HTTP/1.1 "):
                self.status = int(line.split()[1])

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True

    def _on_event(self, data: bytes) -> None:
        if DONE in data:
            self.ended = True
            return
        event = json.loads(data)
        now = time.monotonic()
        for choice in event.get("choices", ()):
            for word in choice["text"].split():
                self._on_token(word, now)

    def _on_token(self, word: str, now: float) -> None:
        window = self._window
        gap_s = now - max(self.heard_at, window.began_at)
        window.longest_gap_s = max(window.longest_gap_s, gap_s)
        window.tokens += 1
        age_s = self._stamps.age_s(word, now)
        if age_s is not None:
            window.ages_s.append(age_s)
        self.heard_at = now
        self.num_tokens += 1


class SleepyClient(asyncio.Protocol):
    """A connection whose request never ends."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(SLEEPY_BEGIN)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None


class RawClients:
    """All clients of one front end, as the object of a `Child`."""

    def __init__(self) -> None:
        self._streams: list[StreamClient] = []
        self._sleepers: list[SleepyClient] = []
        self._window = Window()
        self._background: list[asyncio.Task[None]] = []
        self._answers: list[HttpAnswer] = []

    async def connect(self, *ports: int) -> None:
        """The doors of the front end: streams take turns, all else goes to the first."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._ports = cycle(ports)
        self._port = ports[0]
        self._stamps = load_stamps()

    # -- streams

    async def open_streams(
        self, count: int, prompt_tokens: int, tokens: int, wait: bool = True
    ) -> None:
        """Begin streams at once, each with a prompt of its own; `wait`: until each has a token."""
        first = len(self._streams)
        opened = []
        for number in range(first, first + count):
            body = streamed(prompt_of_ids(prompt_tokens, number), tokens)
            opened.append(self._open_stream(json.dumps(body).encode()))
        clients = await asyncio.gather(*opened)
        while wait and not all(x.num_tokens or x.ended for x in clients):
            await asyncio.sleep(POLL_S)

    async def _open_stream(self, data: bytes) -> StreamClient:
        request = encode_request("POST", COMPLETIONS, data)
        client = StreamClient(request, self._window, self._stamps)
        loop = asyncio.get_running_loop()
        port = next(self._ports)
        await loop.create_connection(lambda: client, LOOPBACK, port)
        self._streams.append(client)
        return client

    async def close_streams(self, count: int | None = None) -> None:
        """The clients of the last `count` streams leave; None: all."""
        first = 0 if count is None else len(self._streams) - count
        for client in self._streams[first:]:
            client.transport.abort()
        del self._streams[first:]

    async def begin_window(self) -> None:
        """Count tokens from now on."""
        self._window.begin()

    async def read_window(self, seconds: float) -> TokenFigures:
        """The tokens of so many seconds, or more until there is one."""
        self._window.begin()
        await asyncio.sleep(seconds)
        while not self._window.tokens and not all(x.ended for x in self._streams):
            await asyncio.sleep(POLL_S)
        return self._window.read(self._streams)

    async def end_window(self) -> TokenFigures:
        """The tokens since the window began."""
        return self._window.read(self._streams)

    async def wait_for_progress(self, patience_s: float) -> tuple[float, int]:
        """Seconds until every stream got two tokens more, at most `patience_s`; how many did not.

        A token may have been on its way; the second one was made later.
        """
        began = time.monotonic()
        expected = [(x, x.num_tokens + 2) for x in self._streams]
        while True:
            stalled = sum(x.num_tokens < count and not x.ended for x, count in expected)
            waited_s = time.monotonic() - began
            if not stalled or waited_s >= patience_s:
                return waited_s, stalled
            await asyncio.sleep(POLL_S)

    # -- single requests

    async def post(self, body: Row, answer_s: float = ANSWER_S) -> HttpAnswer:
        """The answer to a completion."""
        data = json.dumps(body).encode()
        return await self._send(encode_request("POST", COMPLETIONS, data), answer_s)

    async def open_padded_stream(
        self, prompt_tokens: int, tokens: int, padding: int
    ) -> None:
        """Begin a stream whose body has ignored fields of so many bytes."""
        body = streamed(prompt_of_ids(prompt_tokens), tokens)
        data = json.dumps(body).encode()
        fields = b"{}," * (padding // 3) + b"{}"
        padded = data[:-1] + b', "metadata": [' + fields + b"]}"
        client = await self._open_stream(padded)
        while not (client.num_tokens or client.ended):
            await asyncio.sleep(POLL_S)

    async def check_health(self, times: int, pause_s: float) -> list[HttpAnswer]:
        """Ask for /health so many times, each on a new connection."""
        answers = []
        for _ in range(times):
            answers.append(
                await self._send(encode_request("GET", "/health"), CONNECT_S)
            )
            await asyncio.sleep(pause_s)
        return answers

    async def begin_health(self) -> None:
        """Ask for /health again and again, until `end_health`."""

        async def ask() -> None:
            while True:
                request = encode_request("GET", "/health")
                self._answers.append(await self._send(request, ANSWER_S))
                await asyncio.sleep(HEALTH_PAUSE_S)

        self._answers = []
        self._start(ask())

    async def begin_requests(self, body: Row, per_s: float) -> None:
        """Send so many completions a second, until `end_requests`."""
        data = json.dumps(body).encode()
        request = encode_request("POST", COMPLETIONS, data)

        async def send() -> None:
            self._answers.append(await self._send(request, ANSWER_S))

        async def send_all() -> None:
            at = time.monotonic()
            async with asyncio.TaskGroup() as requests:
                while True:
                    requests.create_task(send())
                    at += 1 / per_s
                    await asyncio.sleep(at - time.monotonic())

        self._answers = []
        self._start(send_all())

    async def end_requests(self) -> list[HttpAnswer]:
        """The answers so far to what was begun; what is on its way is given up."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._background = []
        return self._answers

    async def take_answers(self, seconds: float) -> list[HttpAnswer]:
        """The answers of the next so many seconds."""
        self._answers = []
        await asyncio.sleep(seconds)
        return self._answers

    def _start(self, work: Any) -> None:
        self._background.append(asyncio.create_task(work))

    async def _send(self, request: bytes, answer_s: float) -> HttpAnswer:
        began = time.monotonic()
        data = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(answer_s):
                reader, writer = await asyncio.open_connection(LOOPBACK, self._port)
                try:
                    writer.write(request)
                    data = await reader.read()
                finally:
                    writer.transport.abort()
        head, _, body = data.partition(b"\r\n\r\n")
        status = int(head.split()[1]) if head else 0
        return HttpAnswer(status, time.monotonic() - began, body)

    # -- sleepy connections

    async def open_sleepy(self, count: int) -> int:
        """Open connections that send a byte from time to time; how many were accepted."""
        loop = asyncio.get_running_loop()
        for _ in range(count):
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    _, client = await loop.create_connection(
                        SleepyClient, LOOPBACK, self._port
                    )
                    self._sleepers.append(client)

        async def trickle() -> None:
            while self._sleepers:
                for client in self._sleepers:
                    if client.transport is not None:
                        client.transport.write(b"a")
                    await asyncio.sleep(SLEEPY_PAUSE_S / len(self._sleepers))

        self._start(trickle())
        return self.num_sleepy

    @property
    def num_sleepy(self) -> int:
        """Sleepy connections that are open."""
        return sum(client.transport is not None for client in self._sleepers)

    async def count_sleepy(self) -> int:
        """See `num_sleepy`."""
        return self.num_sleepy
