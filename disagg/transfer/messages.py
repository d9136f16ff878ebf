"""What routers, senders and receivers tell each other: plain data, and its protobuf form.

    router ── Job: Reserve, Submit, Abort ──► worker ── Step: events and Load ──► router
    prefill ── Ticket: Attach, frames, Renew, Commit ──► decode ── Attached, credit, Ack ──► prefill

What comes from a peer is checked here: RequestError and CorruptFrameError for what no honest peer
sends. Nothing here knows gRPC.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any, Self, TypeVar

from google.protobuf.message import DecodeError, Message

from disagg.errors import CorruptFrameError, DisaggError, RequestError, error_from
from disagg.page import Kind
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.protos.v1 import worker_pb2 as pb
from disagg.wire import Item, Ticket, pack_digests, unpack_digests

Parsed = TypeVar("Parsed", bound=Message)

_KINDS = {kind: kv.Kind.Value(f"KIND_{kind.name}") for kind in Kind}
_KINDS_BACK = {value: kind for kind, value in _KINDS.items()}


def parse(message: type[Parsed], data: bytes) -> Parsed:
    """A protobuf message from a peer; RequestError if the bytes are none."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise RequestError(f"{len(data)} bytes are no {message.DESCRIPTOR.name}") from error


# -- router and worker


class Work(StrEnum):
    """What to do with a job."""

    PREFILL = "prefill"  # compute the prompt and hand it to a decode worker
    LOCAL = "local"  # everything on this worker


@dataclass(frozen=True)
class Job:
    """One attempt of a request, as its workers know it.

    rid, attempt: the router's name of the request, and how often it was started
    prompt:       token ids
    emitted:      tokens that the client has already: decode is forced through them
    sampling:     parameters by the names of the engine
    codec:        codec spec or plan; empty: the one of the worker
    deadline_s:   seconds until the attempt is given up
    """

    rid: str
    attempt: int
    prompt: tuple[int, ...]
    emitted: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    codec: str = ""
    deadline_s: float = 300.0

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"attempt {self.attempt} of {self.rid}"

    def to_message(self) -> pb.Job:
        return pb.Job(**vars(self) | {"sampling": json.dumps(self.sampling)})

    @classmethod
    def from_message(cls, message: pb.Job) -> Self:
        """RequestError for sampling parameters that are no JSON object."""
        return cls(
            rid=message.rid,
            attempt=message.attempt,
            prompt=tuple(message.prompt),
            emitted=tuple(message.emitted),
            sampling=_load_json(message.sampling, "sampling"),
            codec=message.codec,
            deadline_s=message.deadline_s,
        )


@dataclass(frozen=True)
class Grant:
    """A reservation: what the router hands to the prefill worker.

    lease_s:       it ends this long after the last sign of life of its sender
    cached_tokens: leading tokens of the prompt whose pages are at the decode worker already
    """

    nonce: int
    epoch: int
    lease_s: float
    cached_tokens: int = 0

    def to_message(self) -> pb.ReserveResponse:
        return pb.ReserveResponse(**vars(self))

    @classmethod
    def from_message(cls, message: pb.ReserveResponse) -> Self:
        return cls(message.nonce, message.epoch, message.lease_s, message.cached_tokens)


@dataclass(frozen=True)
class Submit:
    """A job for a worker.

    epoch:          the incarnation of the worker that this is meant for
    decode_address: "host:port" of the decode worker, with its `decode_epoch` and the `nonce` of the
                    reservation there; empty for local work
    """

    job: Job
    work: Work
    epoch: int
    decode_address: str = ""
    decode_epoch: int = 0
    nonce: int = 0

    def to_message(self) -> pb.SubmitRequest:
        changed = {"job": self.job.to_message(), "work": pb.Work.Value(f"WORK_{self.work.name}")}
        return pb.SubmitRequest(**vars(self) | changed)

    @classmethod
    def from_message(cls, message: pb.SubmitRequest) -> Self:
        """RequestError for work that nobody knows."""
        known = {pb.Work.Value(f"WORK_{work.name}"): work for work in Work}
        if message.work not in known:
            raise RequestError(f"unknown work {message.work}; known: {', '.join(Work)}")
        return cls(
            job=Job.from_message(message.job),
            work=known[message.work],
            epoch=message.epoch,
            decode_address=message.decode_address,
            decode_epoch=message.decode_epoch,
            nonce=message.nonce,
        )


@dataclass(frozen=True)
class Load:
    """What a worker could take now.

    free_bytes: of its arena, for a reservation or a prompt · slots: sequences
    running:    sequences that compute · waiting: sequences that wait for room in its pool
    """

    free_bytes: int = 0
    slots: int = 0
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """Something happened to a request: a token, the end, an error, or figures.

    index:         of the token among the outputs of the request
    token:         None where none was made
    finish_reason: "stop", "length", "abort"; empty while the request goes on
    error:         what ended the attempt
    stats:         figures of the hand-off, by the names of `metrics.HandoffStats`
    """

    rid: str
    attempt: int
    index: int
    token: int | None = None
    finish_reason: str = ""
    error: DisaggError | None = None
    stats: Mapping[str, Any] | None = None

    def to_message(self) -> pb.TokenEvent:
        return pb.TokenEvent(
            rid=self.rid,
            attempt=self.attempt,
            index=self.index,
            token=self.token,
            finish_reason=self.finish_reason,
            error_reason=self.error.reason if self.error else "",
            error_message=str(self.error) if self.error else "",
            stats="" if self.stats is None else json.dumps(self.stats),
        )

    @classmethod
    def from_message(cls, message: pb.TokenEvent) -> Self:
        reason = message.error_reason
        return cls(
            rid=message.rid,
            attempt=message.attempt,
            index=message.index,
            token=message.token if message.HasField("token") else None,
            finish_reason=message.finish_reason,
            error=error_from(reason, message.error_message) if reason else None,
            stats=_load_json(message.stats, "stats") if message.stats else None,
        )


@dataclass(frozen=True)
class Step:
    """What a worker says at once: the events of an engine step, and what it could take now."""

    events: tuple[TokenEvent, ...] = ()
    load: Load = Load()

    def to_message(self) -> pb.EventsResponse:
        events = [event.to_message() for event in self.events]
        return pb.EventsResponse(events=events, load=pb.Load(**vars(self.load)))

    @classmethod
    def from_message(cls, message: pb.EventsResponse) -> Self:
        load = message.load
        events = tuple(map(TokenEvent.from_message, message.events))
        return cls(events, Load(load.free_bytes, load.slots, load.running, load.waiting))


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker is and how busy: fingerprints, gauges by name, anything else as `info`."""

    epoch: int
    model: str
    plan: str
    gauges: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def to_message(self) -> pb.StatusResponse:
        return pb.StatusResponse(**vars(self) | {"info": json.dumps(self.info)})

    @classmethod
    def from_message(cls, message: pb.StatusResponse) -> Self:
        info = _load_json(message.info, "info")
        return cls(message.epoch, message.model, message.plan, dict(message.gauges), info)


# -- sender and receiver


class State(StrEnum):
    """Where a reservation is in its life; `reservations.py` draws the arrows."""

    HELD = "held"
    ATTACHED = "attached"
    BROKEN = "broken"
    ADMITTED = "admitted"
    FINISHED = "finished"
    EXPIRED = "expired"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"

    @property
    def live(self) -> bool:
        """Still waiting for its pages."""
        return self in (State.HELD, State.ATTACHED, State.BROKEN)

    @property
    def admitted(self) -> bool:
        """Its pages are the engine's."""
        return self in (State.ADMITTED, State.FINISHED)


@dataclass(frozen=True)
class Attach:
    """A sender takes over a reservation. `model`, `plan`: fingerprints, equal on both sides."""

    ticket: Ticket
    model: str
    plan: str
    tokens: int
    direct: bool = False

    def to_message(self) -> kv.AttachRequest:
        return kv.AttachRequest(**vars(self) | {"ticket": ticket_to(self.ticket)})

    @classmethod
    def from_message(cls, message: kv.AttachRequest) -> Self:
        ticket = ticket_from(message.ticket)
        return cls(ticket, message.model, message.plan, message.tokens, message.direct)


@dataclass(frozen=True)
class Attached:
    """The answer: what is here, verified; or that the reservation ended meanwhile.

    state:  ATTACHED, or ADMITTED (commit again to hear the answer), or EXPIRED (it is over)
    have:   items with their digests; those of the first `cached` units of each layer group were
            found by their content keys: the sender takes these digests for its own
    credit: bytes of frames of this hand-off that may be on the way
    port, key: where a direct connection is accepted on the host that answers, and what its hello
            carries; 0: nowhere
    """

    state: State
    have: Mapping[Item, int] = field(default_factory=dict)
    cached: tuple[int, ...] = ()
    lease_s: float = 0.0
    credit: int = 0
    port: int = 0
    key: bytes = b""

    def to_message(self) -> kv.AttachResponse:
        state = kv.HandoffState.Value(f"HANDOFF_STATE_{self.state.name}")
        have = items_to(self.have, self.have.__getitem__)
        return kv.AttachResponse(**vars(self) | {"state": state, "have": have})

    @classmethod
    def from_message(cls, message: kv.AttachResponse) -> Self:
        """RequestError for a state that we do not know."""
        states = (State.ATTACHED, State.ADMITTED, State.EXPIRED)
        known = {kv.HandoffState.Value(f"HANDOFF_STATE_{x.name}"): x for x in states}
        if message.state not in known:
            raise RequestError(f"attach was answered with unknown state {message.state}")
        return cls(
            state=known[message.state],
            have=digests_from(message.have),
            cached=tuple(message.cached),
            lease_s=message.lease_s,
            credit=message.credit,
            port=message.port,
            key=message.key,
        )


@dataclass(frozen=True)
class Credit:
    """What became of `frames` frames of one attachment: `nbytes` more may be sent in their place.

    error: why they were dropped; None: they are stored
    """

    nonce: int
    gen: int
    nbytes: int
    frames: int = 1
    error: DisaggError | None = None

    def to_message(self) -> kv.PushResponse:
        return kv.PushResponse(
            nonce=self.nonce,
            gen=self.gen,
            credit=self.nbytes,
            frames=self.frames,
            error_reason=self.error.reason if self.error else "",
            error_message=str(self.error) if self.error else "",
        )

    @classmethod
    def from_message(cls, message: kv.PushResponse) -> Self:
        reason = message.error_reason
        error = error_from(reason, message.error_message) if reason else None
        return cls(message.nonce, message.gen, message.credit, message.frames, error)


@dataclass(frozen=True)
class Ack:
    """The hand-off is complete and the engine has it. Milliseconds as the receiver measured."""

    verify_ms: float = 0.0
    admit_ms: float = 0.0


@dataclass(frozen=True)
class Nack:
    """The commit names items that are not here."""

    missing: tuple[Item, ...]


def answer_to(answer: Ack | Nack) -> kv.CommitResponse:
    """The answer to a commit, as protobuf."""
    if isinstance(answer, Ack):
        return kv.CommitResponse(ack=kv.Ack(**vars(answer)))
    return kv.CommitResponse(nack=kv.Nack(missing=items_to(answer.missing)))


def answer_from(message: kv.CommitResponse) -> Ack | Nack:
    """From protobuf; RequestError if it is neither."""
    if message.HasField("ack"):
        return Ack(message.ack.verify_ms, message.ack.admit_ms)
    if message.HasField("nack"):
        return Nack(tuple(item for x in message.nack.missing for item in _items(x)))
    raise RequestError("a commit was answered with neither ack nor nack")


def ticket_to(ticket: Ticket) -> kv.Ticket:
    """As protobuf."""
    return kv.Ticket(**vars(ticket))


def ticket_from(message: kv.Ticket) -> Ticket:
    """From protobuf."""
    return Ticket(message.nonce, message.epoch, message.gen)


def items_to(
    items: Iterable[Item], digest_of: Callable[[Item], int] | None = None
) -> list[kv.ItemSet]:
    """Items as sets of one kind, group and layer, with their digests if asked."""
    sets = []
    for (kind, group, layer), run in groupby(sorted(items), lambda item: item[:3]):
        chosen = list(run)
        digests = pack_digests([digest_of(item) for item in chosen]) if digest_of else b""
        records = [item.record for item in chosen]
        fields = {"kind": _KINDS[kind], "group": group, "layer": layer}
        sets.append(kv.ItemSet(**fields, records=records, digests=digests))
    return sets


def digests_from(sets: Iterable[kv.ItemSet]) -> Mapping[Item, int]:
    """Items with their digests; CorruptFrameError unless each has one."""
    found: dict[Item, int] = {}
    for message in sets:
        digests = unpack_digests(message.digests)
        if len(digests) != len(message.records):
            raise CorruptFrameError(f"{len(digests)} digests for {len(message.records)} items")
        found.update(zip(_items(message), digests, strict=True))
    return found


def _items(message: kv.ItemSet) -> list[Item]:
    kind = _KINDS_BACK.get(message.kind)
    if kind is None:
        raise RequestError(f"an item of unknown kind {message.kind}")
    return [Item(kind, message.group, message.layer, record) for record in message.records]


def _load_json(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise RequestError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"{what} is a {type(found).__name__}, not an object")
    return found
