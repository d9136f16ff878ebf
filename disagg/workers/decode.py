"""The decode side of a worker: complete prompts in, tokens out. Lives on the io loop.

receiver ─ admit ─► engine ─ tokens ─► router
             │ dropped: aborted, fenced, superseded by another attempt
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.engine.messages import Abort, Admit, Failed, Token
from disagg.engine.sequence import Request, SamplingParams
from disagg.errors import DisaggError, LayoutError, RequestError
from disagg.transfer.messages import Admission
from disagg.transfer.work import TokenEvent
from disagg.workers.offering import ENCODE_MS
from disagg.workers.prefill import EngineDoor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seat:
    """A request in the engine, by the name the router has for it."""

    rid: str
    attempt: int


class DecodeSide:
    """The requests that decode here.

    on_done: called with (rid, attempt) when the engine has freed a request
    release: frees the records of a prompt that the engine cannot be given
    """

    def __init__(
        self,
        engine: EngineDoor,
        say: Callable[[Iterable[TokenEvent]], None],
        on_done: Callable[[str, int], None],
        release: Callable[[Sequence[int]], None],
    ):
        self._engine = engine
        self._say = say
        self._on_done = on_done
        self._release = release
        self._seats: dict[str, Seat] = {}

    @property
    def seats(self) -> list[Seat]:
        """Who decodes here."""
        return list(self._seats.values())

    def admit(self, admission: Admission) -> None:
        """A prompt is here, complete and verified: the engine goes on from its first token.

        Raises LayoutError, with its records freed, for a commit that does not say what to do.
        """
        seat = Seat(admission.rid, admission.attempt)
        try:
            request, emitted = _read(engine_name(seat), admission)
        except LayoutError:
            for state in admission.groups:
                self._release(list(state.ids()))
            raise
        self._seats[request.rid] = seat
        encode_ms = admission.commit.timings.get(ENCODE_MS, 0.0)
        self._engine.submit(Admit(request, admission.groups, emitted, encode_ms))

    def drop(self, rid: str, attempt: int, reason: str) -> None:
        """A request that was admitted is given up: nothing more of it is said."""
        log.info("attempt %d of %s is dropped: %s", attempt, rid, reason)
        name = engine_name(Seat(rid, attempt))
        self._seats.pop(name, None)
        self._engine.submit(Abort(name))

    def fail(self, rid: str, attempt: int, error: DisaggError) -> None:
        """A request was dropped, and the router does not know: it may try again."""
        self._say([TokenEvent(rid, attempt, 0, error=error)])

    def step(self, outputs: Iterable[Token | Failed]) -> None:
        """What an engine step brought; entries that are not of this side are left alone."""
        events = []
        for output in outputs:
            seat = self._seats.get(output.rid)
            if seat is None:
                continue
            if isinstance(output, Failed):
                events.append(TokenEvent(seat.rid, seat.attempt, 0, error=output.error))
            else:
                reason = output.finish_reason or ""
                events.append(
                    TokenEvent(seat.rid, seat.attempt, output.index, output.token, reason)
                )
            if isinstance(output, Failed) or output.finish_reason:
                del self._seats[output.rid]
                self._on_done(seat.rid, seat.attempt)
        if events:
            self._say(events)


def engine_name(seat: Seat) -> str:
    """The name of a decoding request in the engine; a prefill of the same request has another."""
    return f"{seat.rid}#{seat.attempt}/d"


def _read(name: str, admission: Admission) -> tuple[Request, tuple[int, ...]]:
    """What to do with a prompt, as its commit says: (request, emitted tokens)."""
    extras: Mapping[str, Any] = admission.commit.extras
    try:
        params = SamplingParams(**extras["sampling"])
        request = Request(name, tuple(extras["prompt"]), params, extras["codec"])
        emitted = tuple(extras["emitted"])
    except (KeyError, TypeError, RequestError) as error:
        raise LayoutError(f"a commit that decode cannot follow: {error}") from error
    if len(request.tokens) != admission.tokens or not emitted:
        raise LayoutError(
            f"KV of {admission.tokens} tokens came with {len(request.tokens)} tokens of prompt "
            f"and {len(emitted)} emitted"
        )
    return request, emitted
