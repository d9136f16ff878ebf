"""Groups of ranks in one process: arenas with slices of one worker's records."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg.kv.arena import Arena
from disagg.kv.page import Kind
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.state import GroupState, allocate_groups
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.follower_calls import Followers
from disagg.transfer.messages import Attach, Attached, Grant, Job, parse
from disagg.transfer.partition import Partition, part_nonce
from disagg.transfer.receiver import PageReceiver, Receiver
from disagg.transfer.records import ArenaSource, Manifest
from disagg.transfer.sender import SendQueue
from disagg.wire import Commit, Ticket, digest, frame_message, message_frame, pack
from disagg.worker.follower_service import FollowerService
from disagg.worker.handoff import SendingContext
from tests.transfer.desk import Desk
from tests.transfer.prompts import EPOCH, MODEL, Prompt, make_pool

LayerPage = tuple[LayerGroup, Kind, int, int]  # layer, record


def layer_pages(plan: Plan, states: Sequence[GroupState]) -> Iterator[LayerPage]:
    """Every layer page of a sequence, its states included."""
    for group, state in zip(plan.groups, states, strict=True):
        for kind, ids in state.ids_by_kind().items():
            for layer in group.layers:
                for page in ids:
                    yield group, kind, layer, page


def slice_bytes(whole: Prompt, ranks: int) -> list[list[bytes]]:
    """The layer pages of a prompt, cut by heads: those of each rank."""
    slices: list[list[bytes]] = [[] for _ in range(ranks)]
    for group, kind, layer, page in layer_pages(whole.plan, whole.states):
        layout = group.layout(kind)
        start = group.address(layout, page, layer)
        data = bytes(whole.pool.arena.read(start, group.layer_bytes(layout)))
        size = len(data) // ranks
        for rank in range(ranks):
            slices[rank].append(data[rank * size : (rank + 1) * size])
    return slices


def bytes_of(arena: Arena, plan: Plan, states: Sequence[GroupState]) -> list[bytes]:
    """The layer pages of a sequence on a rank."""
    pages = []
    for group, kind, layer, page in layer_pages(plan, states):
        layout = group.layout(kind)
        start = group.address(layout, page, layer)
        pages.append(bytes(arena.read(start, group.layer_bytes(layout))))
    return pages


@dataclass
class SendingRank:
    """The records of a rank of a prefill worker: a slice of a whole prompt's."""

    plan: Plan
    arena: Arena
    states: Sequence[GroupState]

    @classmethod
    def of(cls, whole: Prompt, rank: int, ranks: int) -> "SendingRank":
        plan = whole.plan.divided(ranks)
        pool = make_pool(1 << 21, 1 << 17)
        states = allocate_groups(plan, whole.tokens, pool)
        pages = zip(
            layer_pages(plan, states), slice_bytes(whole, ranks)[rank], strict=True
        )
        for (group, kind, layer, page), data in pages:
            start = group.address(group.layout(kind), page, layer)
            pool.arena.write([(start, data)])
        return cls(plan, pool.arena, states)


def sending_group(whole: Prompt, ranks: int) -> list[SendingRank]:
    return [SendingRank.of(whole, rank, ranks) for rank in range(ranks)]


class ReceivingGroup(Desk):
    """A decode worker of several ranks: rank 0's reservations, and followers with arenas.

    plan: of each rank
    """

    def __init__(self, plan: Plan, ranks: int, nbytes: int = 1 << 21, **desk: object):
        self.plan = plan
        self.arenas = [make_pool(nbytes, 1 << 17).arena for _ in range(1, ranks)]
        self.services = [
            self.make_follower(rank, ranks, arena)
            for rank, arena in enumerate(self.arenas, 1)
        ]
        addresses = [f"follower:{rank}" for rank in range(1, ranks)]
        self.followers = Followers(self.services, addresses)
        super().__init__(
            pool=make_pool(nbytes, 1 << 17),
            plan=self.plan,
            ranks=ranks,
            on_close=self.followers.close,
            **desk,
        )
        self.receiver = Receiver(self.ledger, followers=self.followers)
        self.arenas.insert(0, self.pool.arena)
        for arena in self.arenas:
            arena.write([(0, b"\xaa" * arena.nbytes)])  # of prompts before

    def make_follower(self, rank: int, ranks: int, arena: Arena) -> FollowerService:
        context = SendingContext(
            model=MODEL,
            plan_of=lambda spec: self.plan,
            arena=arena,
            peers=None,
            rank=rank,
            ranks=ranks,
        )
        return FollowerService(context)

    def endpoint(self, rank: int) -> PageReceiver:
        """Where a rank takes frames."""
        return self.services[rank - 1].receiver if rank else self.receiver

    def bytes_of(self, rank: int, rid: str = "r") -> list[bytes]:
        """What a rank has of an admitted prompt."""
        groups = self.engine[rid].groups
        return bytes_of(self.arenas[rank], self.plan, groups)


def receiving_group(whole: Prompt, ranks: int) -> ReceivingGroup:
    return ReceivingGroup(whole.plan.divided(ranks), ranks)


class Handoff:
    """One hand-off between groups: a queue for each part, and calls instead of sockets."""

    def __init__(
        self, whole: Prompt, senders: Sequence[SendingRank], receivers: ReceivingGroup
    ):
        self.tokens = whole.tokens
        self.receivers = receivers
        self.partition = Partition(len(senders), len(receivers.arenas))
        self.queues: list[SendQueue] = []
        self.nbytes = 0  # of all messages
        for rank, sender in enumerate(senders):
            manifest = Manifest(self.partition.sent_plan(sender.plan), self.tokens)
            for part in self.partition.sent_by(rank):
                heads = self.partition.sent_slice(part)
                queue = SendQueue(manifest)
                source = ArenaSource(sender.arena, manifest, sender.states, heads)
                queue.read_from(source)
                self.queues.append(queue)

    async def reserve(self, whole: Prompt, **changes: object) -> Grant:
        job: Job = whole.job(senders=self.partition.senders, **changes)
        self.grant = await self.receivers.receiver.reserve(job, EPOCH)
        return self.grant

    async def begin(self, whole: Prompt) -> None:
        """Reserve room, and attach every part."""
        await self.reserve(whole)
        for part in range(self.partition.count):
            await self.attach(part)

    def ticket(self, part: int, gen: int = 1) -> Ticket:
        return Ticket(part_nonce(self.grant.nonce, part), self.grant.epoch, gen)

    async def attach(self, part: int, gen: int = 1) -> Attached:
        queue = self.queues[part]
        ticket = self.ticket(part, gen)
        plan = queue.manifest.plan.fingerprint
        attach = Attach(ticket, MODEL, plan, self.tokens)
        data = attach.to_proto().SerializeToString()
        reply = await self.receivers.receiver.attach(data)
        self.nbytes += len(data) + len(reply)
        attached = Attached.from_proto(parse(kv.AttachResponse, reply))
        queue.restart(attached.received(), attached.credit)
        return attached

    def messages(self, part: int, gen: int = 1) -> Iterator[bytes]:
        """The frames of a part that are missing, as if each were answered."""
        queue = self.queues[part]
        if not queue._offered_at:
            queue.offer(queue.manifest.items, 0.0)
        while frame := queue.next_frame(self.ticket(part, gen), 0.0):
            yield frame_message(frame.parts)
            queue.on_answer()

    def push(self, part: int, gen: int = 1) -> int:
        """Send what is missing of a part; how many frames that was."""
        rank = self.partition.receiver_of(part)
        count = 0
        for message in self.messages(part, gen):
            frame = message_frame(message)
            answer = self.receivers.endpoint(rank).take(frame, self)
            assert answer.error is None, answer.error
            self.nbytes += len(message) + answer.to_proto().ByteSize()
            count += 1
        return count

    async def commit(self, part: int, gen: int = 1, first_token: int = 5) -> None:
        commit = self.queues[part].commit(self.ticket(part, gen), first_token, {})
        await self.send_commit(commit)

    async def commit_early(self, part: int, gen: int) -> None:
        """Commit a part, whether or not all of it was sent."""
        queue = self.queues[part]
        payload = queue._source.read(queue.manifest.items)
        queue._sent_digests = dict(enumerate(map(digest, payload)))
        await self.commit(part, gen)

    async def send_commit(self, commit: Commit) -> None:
        message = frame_message(pack(commit))
        reply = await self.receivers.receiver.commit(message)
        self.nbytes += len(message) + len(reply)

    async def run(self, whole: Prompt, **changes: object) -> int:
        """All of it; how many bytes all messages have."""
        await self.reserve(whole, **changes)
        for part in range(self.partition.count):
            await self.attach(part)
            self.push(part)
        for part in range(self.partition.count):
            await self.commit(part)
        return self.nbytes
