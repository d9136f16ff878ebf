"""Many streams at once, each compared with what it has to be, whatever dies meanwhile."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from disagg.cli.client import complete
from disagg.cli.state_file import RunningService
from disagg.errors import DisaggError
from tests.cli.test_private import BODY, PROMPT
from tests.processes import wait_for

STREAMS, PROMPTS, TOKENS = 40, 4, 200
Body = Mapping[str, Any]  # of a request
BODIES = tuple(
    BODY | {"prompt": f"{number}. {PROMPT}", "max_tokens": TOKENS}
    for number in range(PROMPTS)
)


@dataclass
class Stream:
    """An answer that is read without a second try.

    at: when each piece came
    """

    number: int
    body: Body
    pieces: list[str] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    error: DisaggError | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def read(self, state: RunningService) -> "Stream":
        try:
            complete(state, self.body, self._show)
        except DisaggError as error:
            self.error = error
        return self

    def _show(self, piece: str) -> None:
        self.pieces.append(piece)
        self.at.append(time.monotonic())

    @property
    def longest_pause_s(self) -> float:
        return max(
            (
                after - before
                for before, after in zip(self.at, self.at[1:], strict=False)
            ),
            default=0.0,
        )


@dataclass
class Crowd:
    """Streams that have begun, and what each has to be.

    bodies:   what streams ask for, in turn
    expected: the answer to each
    """

    state: RunningService
    bodies: Sequence[Body]
    expected: list[str]
    pool: ThreadPoolExecutor
    size: int
    streams: list[Stream] = field(default_factory=list)
    futures: list[Future[Stream]] = field(default_factory=list)

    def begin(self) -> None:
        """Returns when every stream has a piece."""
        self.send()
        wait_for(lambda: all(stream.pieces for stream in self.streams))

    def send(self) -> None:
        """Ask for all answers."""
        self.streams = [
            Stream(number, self.bodies[number % len(self.bodies)])
            for number in range(self.size)
        ]
        self.futures = [
            self.pool.submit(stream.read, self.state) for stream in self.streams
        ]

    def end(self) -> list[Stream]:
        return [future.result() for future in self.futures]

    def is_exact(self, stream: Stream) -> bool:
        return stream.text == self.expected[stream.number % len(self.bodies)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(STREAMS) as pool:
        yield pool


def crowd_of(
    state: RunningService,
    pool: ThreadPoolExecutor,
    size: int = STREAMS,
    bodies: Sequence[Body] = BODIES,
) -> Crowd:
    expected = [Stream(0, body).read(state).text for body in bodies]
    assert all(expected)
    return Crowd(state, bodies, expected, pool, size)


def count_cut(crowd: Crowd, streams: list[Stream]) -> tuple[int, int]:
    """How many streams were cut and how many are whole: some of each, the whole ones exact."""
    cut = [stream for stream in streams if stream.error]
    whole = [stream for stream in streams if not stream.error]
    assert all(crowd.is_exact(stream) for stream in whole)
    assert cut
    assert whole
    return len(cut), len(whole)


def longest_pause_s(streams: list[Stream]) -> float:
    """How long the stream stood still that stood still for longest."""
    return max(stream.longest_pause_s for stream in streams)
