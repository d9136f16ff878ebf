"""A hand-off between two engines of one process: frames without sockets.

Every record is packed into frames, checked, unpacked and copied, and admitted by the rules of the
service; only the transport is a function call. Frames leave while later layers still compute.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Prefilled
from disagg.engine.sequence import Request, handoff_stats
from disagg.kv.page import Item
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState
from disagg.transfer.messages import Ack, Attach, Job
from disagg.transfer.receiver import Receiver
from disagg.transfer.records import ArenaSource, Manifest
from disagg.transfer.sender import SendQueue
from disagg.transfer.stats import HandoffStats
from disagg.wire import Commit, Ticket, frame_message, message_frame, pack, unpack


class InProcessHandoff:
    """The hand-off of one request: a sender, a receiver, and nothing between them.

    Making one reserves room; CapacityError if there is none now. `stats`: once it is over.
    """

    def __init__(self, request: Request, receiver: Receiver, sender: Engine):
        self.stats: HandoffStats | None = None
        self._request = request
        self._receiver = receiver
        self._rules = receiver.reservations
        self._sender = sender
        job = Job(
            request.rid, 0, request.tokens, (), vars(request.params), request.codec
        )
        grant = self._rules.reserve(job, self._rules.epoch)
        self._ticket = Ticket(grant.nonce, grant.epoch, gen=1)
        self._wire_bytes = 0

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        """The records are there: attach."""
        checklist = Manifest(plan, len(self._request.tokens))
        self._source = ArenaSource(self._sender.pool.arena, checklist, groups)
        self._outbox = SendQueue(checklist, self._source)
        model = self._rules.terms.model
        attach = Attach(self._ticket, model, plan.fingerprint, checklist.tokens)
        attached = self._rules.attach(attach)
        self._wire_bytes += (
            attach.to_proto().ByteSize() + attached.to_proto().ByteSize()
        )
        self._outbox.attached(attached.received(), attached.credit)

    def offer(self, items: Sequence[Item]) -> None:
        """Send what is final."""
        if not self._sender.pool.arena.on_host:
            self._source.stage(items)()
        self._outbox.offer(items, time.monotonic())
        self._send()

    def has(self, item: Item) -> bool:
        """No: encoding all of it is what a process is for that compares codecs."""
        return False

    def finish(self, prefilled: Prefilled) -> None:
        """The prompt is computed: commit, unless its first token ends the answer."""
        self._send()
        plan, tokens = self._outbox.checklist.plan, self._outbox.checklist.tokens
        stats = handoff_stats(
            plan, tokens, prefilled.cached_tokens, prefilled.encode_ms
        )
        ack = Ack()
        if prefilled.finish_reason:
            self._rules.abort(self._request.rid, 0, "nothing to decode")
        else:
            assert self._outbox.drained, "frames do not get lost in a process"
            ack = self._commit(
                self._outbox.commit(self._ticket, prefilled.first_token, {})
            )
        self._sender.submit(Abort(self._request.rid))
        stats = self._outbox.figures(stats, ack, time.monotonic())
        self.stats = replace(stats, wire_bytes=self._wire_bytes)

    def _send(self) -> None:
        while parcel := self._outbox.next_parcel(self._ticket, time.monotonic()):
            message = frame_message(parcel.parts)
            credit = self._receiver.take(message_frame(message), self)
            if credit.error is not None:
                raise credit.error
            self._wire_bytes += len(message) + credit.to_proto().ByteSize()
            self._outbox.answered()

    def _commit(self, commit: Commit) -> Ack:
        """The decode engine has the complete prompt then."""
        message = frame_message(pack(commit))
        frame = unpack(message_frame(message))
        assert isinstance(frame, Commit)
        ack = self._rules.commit(frame)
        self._wire_bytes += len(message) + ack.to_proto().ByteSize()
        return ack
