"""A hand-off between two engines of one process: frames without sockets.

Every record is packed into frames, checked, unpacked and copied, and admitted by the rules of the
service; only the transport is a function call. Frames leave while later layers still compute.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from disagg.engine.engine import Engine
from disagg.engine.messages import Admit, Prefilled, Release
from disagg.engine.sequence import Request
from disagg.plan import Plan
from disagg.protos.v1 import kv_transfer_pb2 as pb
from disagg.state import GroupState
from disagg.transfer import convert
from disagg.transfer.intake import Intake
from disagg.transfer.items import ArenaSource, Checklist
from disagg.transfer.ledger import Ledger
from disagg.transfer.messages import Ack, Nack, Waiter
from disagg.transfer.messages import Admit as Admitted
from disagg.transfer.messages import Request as Reservation
from disagg.transfer.outbox import Outbox
from disagg.wire import Commit, CommitFrame, Item, RenewFrame, Ticket, pack
from disagg.workers.offering import ENCODE_MS


@dataclass(frozen=True)
class HandoffReport:
    """What the KV of one prompt took, and what handing it over cost. Bytes and milliseconds.

    fp16_bytes, fp8_bytes: of the same tokens, uncompressed
    wire_bytes:  all messages of the hand-off, both ways
    wire_ms:     from the first frame to the acknowledgement
    exposed_ms:  from the last layer to the acknowledgement: what computing did not hide
    """

    codec: str
    tokens: int
    fp16_bytes: int
    fp8_bytes: int
    wire_bytes: int
    resident_bytes: int
    encode_ms: float
    wire_ms: float
    exposed_ms: float
    admit_ms: float


class Loopback:
    """The hand-off of one request: a sender, a receiver, and nothing between them."""

    def __init__(self, request: Request, ledger: Ledger, sender: Engine, receiver: Engine):
        self._request = request
        self._ledger = ledger
        self._sender = sender
        self._receiver = receiver
        self._waiter: Waiter | None = None
        self._ticket: Ticket | None = None
        self._prefilled: Prefilled | None = None
        self._ack: Ack | None = None
        self._wire_bytes = 0
        self._first_frame = self._last_offer = self._acknowledged = 0.0

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        """Ask for room; without it, frames wait where they are."""
        checklist = Checklist(plan, len(self._request.tokens))
        self._source = ArenaSource(self._sender.pool.arena, checklist, groups)
        self._outbox = Outbox(checklist, self._source)
        self._intake = Intake(self._ledger, self._receiver.pool.arena, self._admit, time.monotonic)
        reservation = Reservation(
            rid=self._request.rid,
            attempt=0,
            epoch=self._ledger.epoch,
            tokens=checklist.tokens,
            model=self._ledger.terms.model,
            plan=plan.fingerprint,
            wait_s=math.inf,
            spec=self._request.codec,
        )
        self._waiter = self._ledger.reserve(reservation, time.monotonic())
        self._wire_bytes += convert.request_to(reservation).ByteSize()
        self.move()

    def offer(self, items: Sequence[Item]) -> None:
        """Send what is final, as far as there is credit."""
        if not self._sender.pool.arena.on_host:
            self._source.stage(items)()
        self._last_offer = time.monotonic()
        self._outbox.offer(items, self._last_offer)
        self.move()

    def finish(self, prefilled: Prefilled) -> None:
        """The prompt is computed; the commit goes out behind the last frame."""
        self._prefilled = prefilled
        self.move()

    def move(self) -> None:
        """Do what can be done now: attach, send, commit."""
        if self._ack is not None or not self._attached():
            return
        assert self._ticket is not None
        while parcel := self._outbox.next_parcel(self._ticket):
            self._first_frame = self._first_frame or time.monotonic()
            self._exchange(b"".join(parcel.parts))
        if self._prefilled is not None and self._outbox.drained:
            commit = Commit(
                tokens=self._outbox.checklist.tokens,
                plan=self._prefilled.plan,
                digests=self._outbox.manifest(),
                first_token=self._prefilled.first_token,
                timings={ENCODE_MS: self._prefilled.usage.encode_ms},
            )
            self._exchange(convert.frame_message(pack(CommitFrame(self._ticket, commit))))

    def report(self) -> HandoffReport:
        """What it took, once it is acknowledged."""
        assert self._prefilled is not None
        assert self._ack is not None
        usage = self._prefilled.usage
        return HandoffReport(
            codec=self._request.codec,
            tokens=usage.tokens,
            fp16_bytes=usage.fp16_bytes,
            fp8_bytes=usage.fp8_bytes,
            wire_bytes=self._wire_bytes,
            resident_bytes=usage.resident_bytes,
            encode_ms=usage.encode_ms,
            wire_ms=1e3 * (self._acknowledged - self._first_frame),
            exposed_ms=1e3 * (self._acknowledged - self._last_offer),
            admit_ms=self._ack.admit_ms,
        )

    def _attached(self) -> bool:
        waiter = self._waiter
        if waiter is not None and waiter.error is not None:
            raise waiter.error
        if self._ticket is None and waiter is not None and waiter.grant is not None:
            grant = waiter.grant
            self._ticket = Ticket(grant.nonce, grant.epoch, gen=1)
            attached = self._ledger.attach(self._ticket, time.monotonic())
            self._wire_bytes += convert.grant_to(grant).ByteSize()
            self._wire_bytes += convert.ticket_to(self._ticket).ByteSize()
            self._wire_bytes += convert.attached_to(attached).ByteSize()
            self._exchange(convert.frame_message(pack(RenewFrame(self._ticket))))
        return self._ticket is not None

    def _exchange(self, message: bytes) -> None:
        """Hand a message to the receiver and take its answer in."""
        answer = self._intake.take(message)
        assert answer is not None
        self._wire_bytes += len(message) + len(answer)
        reply = pb.PushResponse.FromString(answer)
        if reply.HasField("credit"):
            self._outbox.grant(reply.credit.bytes, reply.credit.frames)
            return
        acknowledged = convert.answer_from(reply)
        assert isinstance(acknowledged, Ack), "frames do not get lost in a process"
        self._ack, self._acknowledged = acknowledged, time.monotonic()
        self._sender.submit(Release(self._request.rid))

    def _admit(self, frame: CommitFrame, _nbytes: int) -> Ack | Nack:
        """Give a complete prompt to the decode engine."""
        began = time.monotonic()
        answer = self._ledger.commit(frame, began)
        for action in self._ledger.take_actions():
            if isinstance(action, Admitted):
                admission = action.admission
                self._receiver.submit(
                    Admit(
                        self._request,
                        admission.groups,
                        (admission.commit.first_token,),
                        admission.commit.timings[ENCODE_MS],
                    )
                )
        if isinstance(answer, Ack):
            answer = replace(answer, admit_ms=1e3 * (time.monotonic() - began))
        return answer
