"""KvTransferService of a decode worker: the ledger's rules around a stream and a clock.

Frames are verified and copied inline, at most 2 MiB at a time, so that nothing comes between a
check and what follows from it. Every refusal reaches the sender with its name.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Self

import grpc

from disagg.errors import CorruptFrameError, DisaggError
from disagg.pool import Arena
from disagg.protos.v1 import kv_transfer_pb2 as pb
from disagg.state import Allocator
from disagg.transfer import convert
from disagg.transfer.client import PUSH, SERVICE
from disagg.transfer.intake import Intake
from disagg.transfer.ledger import Ledger
from disagg.transfer.messages import Ack, Admission, Admit, Drop, Nack, Settled
from disagg.transfer.probe import ABSORB, absorb
from disagg.transfer.push_server import PushServer
from disagg.transfer.security import Security
from disagg.transfer.service import parse, rpc_handlers
from disagg.transfer.sharing import Damage
from disagg.transfer.terms import Terms
from disagg.transfer.upkeep import Upkeep
from disagg.wire import Buffer, CommitFrame, unpack

LEAST_MS = 1e-6
log = logging.getLogger(__name__)


class Receiver:
    """Takes prompts in and hands them to the engine. Lives on the io loop.

    on_admit: called with every complete prompt; only enqueues. A DisaggError from it refuses the
              prompt, whose records it has freed by then.
    on_drop:  called with (rid, attempt, reason) of a prompt that the engine was given and must
              drop and free
    on_damage: called with (rid, attempt, error) of a prompt dropped for its damaged pages
    """

    def __init__(
        self,
        terms: Terms,
        allocator: Allocator,
        arena: Arena,
        on_admit: Callable[[Admission], None],
        on_drop: Callable[[str, int, str], None],
        on_damage: Callable[[str, int, DisaggError], None] = lambda rid, attempt, error: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.ledger = Ledger(terms, allocator, lambda: secrets.randbits(64))
        self._arena = arena
        self._on_admit = on_admit
        self._on_drop = on_drop
        self._on_damage = on_damage
        self._clock = clock
        self._settled: dict[int, asyncio.Event] = {}
        self._upkeep = Upkeep(self.ledger, clock, self.tick, self.scrub)
        self.failures: Counter[str] = Counter()  # refusals by reason
        self.streams = PushServer({PUSH: self.push, ABSORB: absorb}, self._note)

    # -- for the worker

    def serve(self, host: str, security: Security | None = None) -> grpc.GenericRpcHandler:
        """Take frames, on a port that `attach` tells; what `channel.start_server` serves beside."""
        self.streams.start(host, security)
        calls = {
            "Reserve": self.reserve,
            "Attach": self.attach,
            "Commit": self.commit,
            "Abort": self.abort_call,
            "Release": self.release,
            "Probe": self.probe,
        }
        return rpc_handlers(SERVICE, calls, on_refusal=self._note)

    def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Give up an attempt and all before it, known or not."""
        self.ledger.abort(rid, attempt, reason, self._clock())
        self._act()

    def finished(self, rid: str, attempt: int) -> None:
        """The engine is done with a prompt and has freed it."""
        self.ledger.finished(rid, attempt)
        self.make_room()

    def make_room(self) -> None:
        """Records were freed: serve who waits for room."""
        self.ledger.make_room(self._clock())
        self._act()

    def fence(self, epoch: int) -> None:
        """A new epoch; ReservationError if it is lower than the one of now."""
        self.ledger.fence(epoch, self._clock())
        self._act()

    def drain(self) -> None:
        """Take no new reservations; what is reserved may still complete."""
        self.ledger.draining = True

    def gauges(self) -> dict[str, int]:
        """What is held; all zero when nothing goes on."""
        return self.ledger.gauges()

    def tick(self) -> None:
        """End what is over by now; the ticker calls it when something is due."""
        self.ledger.expire(self._clock())
        self.make_room()

    def scrub(self, max_bytes: int) -> list[Damage]:
        """Verify the next kept pages, up to so many bytes; damaged ones are forgotten and told."""
        damages = self.ledger.scrub(max_bytes, self._clock())
        self._act()
        for damage in damages:
            log.error("%s; %d requests had it", damage.error, len(damage.requests))
            for rid, attempt in damage.requests:
                self._on_damage(rid, attempt, damage.error)
        return damages

    async def __aenter__(self) -> Self:
        self._upkeep.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.streams.stop()
        await self._upkeep.stop()

    # -- the service: bytes of messages in and out

    async def reserve(self, data: bytes) -> bytes:
        """A ReserveResponse, when there is room."""
        waiter = self.ledger.reserve(
            convert.request_from(parse(pb.ReserveRequest, data)), self._clock()
        )
        settled = self._settled.setdefault(id(waiter), asyncio.Event())
        try:
            self._act()
            if not waiter.settled:
                await settled.wait()
        finally:
            self._settled.pop(id(waiter), None)
            self.ledger.leave(waiter, self._clock())
            self._act()
        if waiter.error is not None:
            raise waiter.error
        assert waiter.grant is not None
        answer = convert.grant_to(waiter.grant).SerializeToString()
        self._count(waiter.grant.nonce, data, answer)
        return answer

    async def attach(self, data: bytes) -> bytes:
        """An AttachResponse."""
        ticket = convert.ticket_from(parse(pb.AttachRequest, data).ticket)
        attached = self.ledger.attach(ticket, self._clock())
        self._act()
        attached = replace(attached, push_port=self.streams.port)
        answer = convert.attached_to(attached).SerializeToString()
        self._count(ticket.nonce, data, answer)
        return answer

    async def commit(self, data: bytes) -> bytes:
        """A CommitResponse to a commit frame outside of a stream."""
        frame = unpack(convert.message_frame(data))
        if not isinstance(frame, CommitFrame):
            raise CorruptFrameError(f"a {type(frame).__name__} where a commit was expected")
        answer = self._admit(frame, len(data))
        return convert.answer_to(answer, pb.CommitResponse).SerializeToString()

    async def abort_call(self, data: bytes) -> bytes:
        """An AbortResponse."""
        message = parse(pb.AbortRequest, data)
        self.abort(message.rid, message.attempt, message.reason)
        return pb.AbortResponse().SerializeToString()

    async def release(self, data: bytes) -> bytes:
        """A ReleaseResponse."""
        ticket = convert.ticket_from(parse(pb.ReleaseRequest, data).ticket)
        self.ledger.release(ticket, self._clock())
        self._act()
        return pb.ReleaseResponse().SerializeToString()

    async def probe(self, data: bytes) -> bytes:
        """A ProbeResponse."""
        return pb.ProbeResponse(push_port=self.streams.port).SerializeToString()

    def push(self, messages: AsyncIterator[Buffer]) -> AsyncGenerator[bytes, None]:
        """PushResponses to the frames of one stream, until the commit is acknowledged."""
        intake = Intake(self.ledger, self._arena, self._admit, self._clock)
        return intake.answers(messages, self._act)

    def _admit(self, frame: CommitFrame, nbytes: int) -> Ack | Nack:
        """Commit; where that completes a prompt the engine has it before this returns."""
        began = self._clock()
        answer = self.ledger.commit(frame, began)
        handoff = self.ledger.handoff(frame.ticket.nonce)
        assert handoff is not None
        if isinstance(answer, Ack) and not answer.admit_ms:
            answer = replace(answer, admit_ms=LEAST_MS)  # its size counts before its value is known
        handoff.wire_bytes += nbytes + convert.answer_to(answer, pb.PushResponse).ByteSize()
        self._act()
        if isinstance(answer, Ack):
            admit_ms = max(answer.admit_ms, 1000 * (self._clock() - began))
            handoff.ack = answer = replace(answer, admit_ms=admit_ms)
        return answer

    def _act(self, sooner: bool = True) -> None:
        """Do what the ledger decided, wake the ticker if `sooner`; raises the engine's refusal."""
        if sooner:
            self._upkeep.wake()
        refusal: DisaggError | None = None
        for action in self.ledger.take_actions():
            if isinstance(action, Settled):
                if settled := self._settled.get(id(action.waiter)):
                    settled.set()
            elif isinstance(action, Drop):
                self._on_drop(action.rid, action.attempt, action.reason)
            else:
                refusal = self._hand_over(action) or refusal
        if refusal is not None:
            raise refusal

    def _hand_over(self, action: Admit) -> DisaggError | None:
        handoff = self.ledger.handoff(action.nonce)
        assert handoff is not None
        admission = replace(
            action.admission, wire_bytes=handoff.wire_bytes, verify_ms=handoff.verify_ms
        )
        try:
            self._on_admit(admission)
        except DisaggError as refusal:
            self.ledger.reject(action.nonce, str(refusal), self._clock())
            return refusal
        return None

    def _note(self, error: DisaggError) -> None:
        self.failures[error.reason] += 1

    def _count(self, nonce: int, *messages: bytes) -> None:
        if handoff := self.ledger.handoff(nonce):
            handoff.wire_bytes += sum(map(len, messages))
