"""A hand-off between two engines of one process: frames without sockets.

Every record is packed into frames, checked, unpacked, copied and admitted as between two workers;
only the transport is a function call. Frames leave while later layers still compute.
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
from disagg.transfer.records import Addresses, ArenaSource, Manifest
from disagg.transfer.sender import SendQueue
from disagg.transfer.stats import HandoffStats
from disagg.wire import Commit, Ticket, frame_message, message_frame, pack, unpack


class InProcessHandoff:
    """The hand-off of one request from the engine `prefill` to a receiver in the same process.

    The constructor reserves room; CapacityError if there is none now.
    stats: None until the hand-off is over
    """

    def __init__(self, request: Request, receiver: Receiver, prefill: Engine):
        self.stats: HandoffStats | None = None
        self._request = request
        self._receiver = receiver
        self._reservations = receiver.reservations
        self._prefill = prefill
        job = Job(
            rid=request.rid,
            attempt=0,
            prompt=request.tokens,
            sampling=vars(request.params),
            codec=request.codec,
        )
        grant = self._reservations.reserve(job, self._reservations.epoch)
        self._ticket = Ticket(grant.nonce, grant.epoch, gen=1)
        self._wire_bytes = 0

    # -- called by the engine

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        """The records are allocated: attach."""
        manifest = Manifest(plan, len(self._request.tokens))
        self._groups = groups
        self._source = ArenaSource(self._prefill.pool.arena, manifest, groups)
        self._queue = SendQueue(manifest)
        self._queue.read_from(self._source)
        attach = Attach(
            ticket=self._ticket,
            model=self._reservations.policy.model,
            plan=plan.fingerprint,
            tokens=manifest.tokens,
        )
        attached = self._reservations.attach(attach)
        self._wire_bytes += attach.to_proto().ByteSize()
        self._wire_bytes += attached.to_proto().ByteSize()
        self._in_place = frozenset(attached.have)
        self._queue.restart(attached.received(), attached.credit)

    def offer(self, items: Sequence[Item]) -> None:
        """The bytes of these items are final: send them."""
        if not self._prefill.pool.arena.on_host:
            wait_for_copies = self._source.stage(items)
            wait_for_copies()
        self._queue.offer(items, time.monotonic())
        self._send()

    def has(self, item: Item) -> bool:
        """False: everything is encoded, as one process is for comparing codecs."""
        return False

    # -- called by the LLM

    def copies(self, groups: Sequence[GroupState]) -> list[tuple[int, int, int]]:
        """What other ranks copy between their arenas: starts in both, and bytes.

        groups: the records at the receiver
        """
        manifest = self._queue.manifest
        source = Addresses(manifest, self._groups)
        target = Addresses(manifest, groups)
        copies = []
        for index, item in enumerate(manifest.items):
            if index in self._in_place:
                continue
            spans = zip(source.spans(item), target.spans(item), strict=True)
            copies += [
                (read, written, nbytes) for (read, nbytes), (written, _) in spans
            ]
        return copies

    def finish(self, prefilled: Prefilled) -> None:
        """The prompt is computed: commit, unless its first token ends the answer."""
        self._send()
        manifest = self._queue.manifest
        ack = Ack()
        if prefilled.finish_reason:
            self._reservations.abort(self._request.rid, 0, "nothing to decode")
        else:
            assert self._queue.drained, "frames do not get lost in a process"
            commit = self._queue.commit(self._ticket, prefilled.first_token, extras={})
            ack = self._commit(commit)
        self._prefill.submit(Abort(self._request.rid))
        prefill_stats = handoff_stats(
            manifest.plan,
            manifest.tokens,
            prefilled.cached_tokens,
            prefilled.encode_ms,
        )
        stats = self._queue.stats(prefill_stats, ack, time.monotonic())
        self.stats = replace(stats, wire_bytes=self._wire_bytes)

    def _send(self) -> None:
        while frame := self._queue.next_frame(self._ticket, time.monotonic()):
            message = frame_message(frame.parts)
            answer = self._receiver.take(message_frame(message), channel=self)
            if answer.error is not None:
                raise answer.error
            self._wire_bytes += len(message) + answer.to_proto().ByteSize()
            self._queue.on_answer()

    def _commit(self, commit: Commit) -> Ack:
        """Hand the complete prompt to the decode engine."""
        message = frame_message(pack(commit))
        frame = unpack(message_frame(message))
        assert isinstance(frame, Commit)
        ack = self._reservations.commit(frame)
        self._wire_bytes += len(message) + ack.to_proto().ByteSize()
        return ack
