"""The messages of routers, senders and receivers: plain data, and its protobuf form.

    router ── Job: Reserve, Submit, Abort ──► worker ── StepEvents: events, Load ──► router
    prefill ─ Ticket: Attach, frames, Renew, Commit ─► decode ─ Attached, FrameAnswer, Ack ► prefill

The .proto files say what each field means; the docstrings here add what only Python has. Each
message converts itself: `to_proto` fills every field, `from_proto` checks what a peer sent and
raises RequestError for what no honest peer sends.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self, TypeVar

from google.protobuf.message import DecodeError, Message

from disagg.config import EngineConfig
from disagg.errors import CorruptFrameError, DisaggError, RequestError, error_from
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.protos.v1 import worker_pb2 as pb
from disagg.wire import WIRE_VERSION, Buffer, Commit, Ticket, unpack

Parsed = TypeVar("Parsed", bound=Message)
Json = TypeVar("Json", dict[str, Any], list[Any])

# of worker.proto: raised with every change that a peer of another version would misread
CONTROL_VERSION = 1
VERSIONS = (f"control {CONTROL_VERSION}", f"wire {WIRE_VERSION}")


def parse(message: type[Parsed], data: bytes) -> Parsed:
    """A protobuf message from a peer; RequestError if the bytes are none."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise RequestError(
            f"{len(data)} bytes are no {message.DESCRIPTOR.name}"
        ) from error


def parse_commit(frame: Buffer) -> Commit:
    """A commit frame from a peer; CorruptFrameError or VersionError if the bytes are none."""
    commit = unpack(frame)
    if not isinstance(commit, Commit):
        raise CorruptFrameError(
            f"a {type(commit).__name__} where a commit was expected"
        )
    return commit


# -- router and worker


class Work(StrEnum):
    """What to do with a job."""

    PREFILL = "prefill"  # compute the prompt and hand it to a decode worker
    LOCAL = "local"  # everything on this worker
    MOVE = "move"  # hand what decodes here to another decode worker


class Role(StrEnum):
    """What a worker admits: `prefills` prompts for others, `decodes` those of others."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    NONE = "none"

    @property
    def prefills(self) -> bool:
        return self in (Role.PREFILL, Role.BOTH)

    @property
    def decodes(self) -> bool:
        return self in (Role.DECODE, Role.BOTH)


@dataclass(frozen=True)
class WorkerInfo:
    """A worker that can be reached at "host:port", in incarnation `epoch`; `model`: fingerprint.

    min_tokens: shorter prompts are served whole where they decode, if that is here
    ranks:      of its group
    room:       tokens of its own codec that its arena holds
    step_tokens: of prompts, the most that it computes in one step
    snapshots:  of states, the most that it caches; None: it resumes any prefix without them
    sizes:      bytes of two prompts in its arena, by tokens, under each listed codec
    wire_sizes: bytes of the same prompts as they are handed off; empty: those of `sizes`
    speaks:     versions and fingerprints; only workers with equal ones can hand over to each other
    """

    name: str
    role: Role
    address: str
    epoch: int
    model: str = ""
    min_tokens: int = 0
    ranks: int = 1
    room: int = 0
    step_tokens: int = EngineConfig.max_batch_tokens
    snapshots: int | None = None
    sizes: Mapping[str, Mapping[int, int]] = field(default_factory=dict, hash=False)
    wire_sizes: Mapping[str, Mapping[int, int]] = field(
        default_factory=dict, hash=False
    )
    speaks: tuple[str, ...] = ()

    def bytes_of(self, codec: str, tokens: int) -> float:
        """Of a prompt in the arena of the worker."""
        return _linear(self.sizes, codec, tokens)

    def wire_bytes_of(self, codec: str, tokens: int) -> float:
        """Of a prompt that is handed off: the states of a hybrid model may be rounded."""
        return _linear(self.wire_sizes or self.sizes, codec, tokens)


def _linear(sizes: Mapping[str, Mapping[int, int]], codec: str, tokens: int) -> float:
    """Bytes of a prompt: linear in its tokens, through the two sizes of its codec.

    A codec that is not listed counts as the worker's default, which is listed first.
    """
    default = next(iter(sizes.values()), {0: 0, 1: 0})
    (short, short_bytes), (long, long_bytes) = sizes.get(codec, default).items()
    bytes_per_token = (long_bytes - short_bytes) / (long - short)
    return short_bytes + bytes_per_token * (tokens - short)


def spoken(model: str, plans: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """What `WorkerInfo.speaks` says of a worker of this version.

    model: its fingerprint
    plans: spec and fingerprint of each plan that its settings list, its own first
    """
    fingerprints = [f"plan {spec} {fingerprint}" for spec, fingerprint in plans]
    return (*VERSIONS, f"model {model}", *fingerprints)


def serves(roles: Collection[Role]) -> bool:
    """Whether workers of these roles can answer a prompt."""
    return any(role.prefills for role in roles) and any(role.decodes for role in roles)


@dataclass(frozen=True)
class Job:
    """One attempt of a request, as its workers know it.

    sampling: parameters, by the field names of the engine's SamplingParams
    moved:    tokens in the records of a sequence that moves while it decodes; 0: a prompt's
    waited_s: how long the request has waited before this attempt
    prediction: tokens that the answer may repeat
    request_id: the client's name of the request, for logs; several may have the same
    senders:  ranks of the worker that hands the records over
    """

    rid: str
    attempt: int
    prompt: Sequence[int]
    emitted: Sequence[int] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    codec: str = ""
    deadline_s: float = 300.0
    moved: int = 0
    waited_s: float = 0.0
    prediction: Sequence[int] = ()
    request_id: str = ""
    senders: int = 1

    @property
    def text_length(self) -> int:
        """Tokens of prompt and answer when the prompt is computed, without the last new one."""
        return len(self.prompt) + max(0, len(self.emitted) - 1)

    @property
    def tokens(self) -> int:
        """How many tokens its records hold when they are handed over."""
        return self.moved or len(self.prompt)

    @property
    def name(self) -> str:
        """How messages and lines of a log call it."""
        name = f"attempt {self.attempt} of {self.rid}"
        return f"{name} (request {self.request_id})" if self.request_id else name

    def to_proto(self) -> pb.Job:
        return pb.Job(
            rid=self.rid,
            attempt=self.attempt,
            prompt=self.prompt,
            emitted=self.emitted,
            sampling=json.dumps(self.sampling),
            codec=self.codec,
            deadline_s=self.deadline_s,
            moved=self.moved,
            waited_s=self.waited_s,
            prediction=self.prediction,
            request_id=self.request_id,
            sender_followers=self.senders - 1,
        )

    @classmethod
    def from_proto(cls, message: pb.Job) -> Self:
        """RequestError for sampling that is no JSON object."""
        sampling: dict[str, Any] = {}
        if message.sampling:
            sampling = parse_json("sampling", message.sampling, dict)
        return cls(
            rid=message.rid,
            attempt=message.attempt,
            prompt=tuple(message.prompt),
            emitted=tuple(message.emitted),
            sampling=sampling,
            codec=message.codec,
            deadline_s=message.deadline_s,
            moved=message.moved,
            waited_s=message.waited_s,
            prediction=tuple(message.prediction),
            request_id=message.request_id,
            senders=message.sender_followers + 1,
        )


@dataclass(frozen=True)
class Grant:
    """A reservation: what the router hands to the prefill worker.

    followers: "host:port" of each follower of the decode worker, where its parts are sent
    """

    nonce: int
    epoch: int
    followers: tuple[str, ...] = ()

    def to_proto(self) -> pb.ReserveResponse:
        return pb.ReserveResponse(
            nonce=self.nonce, epoch=self.epoch, followers=self.followers
        )

    @classmethod
    def from_proto(cls, message: pb.ReserveResponse) -> Self:
        return cls(
            nonce=message.nonce,
            epoch=message.epoch,
            followers=tuple(message.followers),
        )


@dataclass(frozen=True)
class Submit:
    """A job for a worker, with the reservation at a decode worker unless the work is local.

    decode_followers: as in `Grant`
    """

    job: Job
    work: Work
    epoch: int
    decode_address: str = ""
    decode_epoch: int = 0
    nonce: int = 0
    router: str = ""
    decode_followers: tuple[str, ...] = ()

    def to_proto(self) -> pb.SubmitRequest:
        return pb.SubmitRequest(
            job=self.job.to_proto(),
            work=f"WORK_{self.work.name}",
            epoch=self.epoch,
            decode_address=self.decode_address,
            decode_epoch=self.decode_epoch,
            nonce=self.nonce,
            router=self.router,
            decode_followers=self.decode_followers,
        )

    @classmethod
    def from_proto(cls, message: pb.SubmitRequest) -> Self:
        """RequestError for an unknown kind of work, and for a job that is none."""
        return cls(
            job=Job.from_proto(message.job),
            work=_work_from_proto(message.work),
            epoch=message.epoch,
            decode_address=message.decode_address,
            decode_epoch=message.decode_epoch,
            nonce=message.nonce,
            router=message.router,
            decode_followers=tuple(message.decode_followers),
        )


@dataclass(frozen=True)
class Load:
    """How much a worker could take now, in bytes and sequences, and how many wait for room.

    role:      what it admits; None: the role it started with
    step:      number of the engine's step that runs, or ran last
    stalled_s: seconds without progress of the running step, which progresses with each layer of a
               prompt; 0 while no step runs
    """

    free_bytes: int = 0
    slots: int = 0
    waiting: int = 0
    role: Role | None = None
    step: int = 0
    stalled_s: float = 0.0

    def to_proto(self) -> pb.Load:
        return pb.Load(
            free_bytes=self.free_bytes,
            slots=self.slots,
            waiting=self.waiting,
            role=None if self.role is None else f"ROLE_{self.role.name}",
            step=self.step,
            stalled_s=self.stalled_s,
        )

    @classmethod
    def from_proto(cls, message: pb.Load) -> Self:
        """RequestError for an unknown role."""
        has_role = message.HasField("role")
        return cls(
            free_bytes=message.free_bytes,
            slots=message.slots,
            waiting=message.waiting,
            role=_role_from_proto(message.role) if has_role else None,
            step=message.step,
            stalled_s=message.stalled_s,
        )


@dataclass(frozen=True)
class TokenEvent:
    """Something happened to a request: a token, the end, an error, or figures.

    stats:    figures of the hand-off, by the field names of `stats.HandoffStats`
    logprobs: of the token, if the request asks for them; those of the prompt come before. Each
              entry is the token's own value, then pairs of the likeliest tokens and theirs
    """

    rid: str
    attempt: int
    index: int
    token: int | None = None
    finish_reason: str = ""
    error: DisaggError | None = None
    stats: Mapping[str, Any] | None = None
    logprobs: Sequence[Any] = ()

    def to_proto(self) -> pb.TokenEvent:
        return pb.TokenEvent(
            rid=self.rid,
            attempt=self.attempt,
            index=self.index,
            token=self.token,
            finish_reason=self.finish_reason,
            error=_error_to_proto(self.error),
            stats="" if self.stats is None else json.dumps(self.stats),
            logprobs=json.dumps(self.logprobs) if self.logprobs else "",
        )

    @classmethod
    def from_proto(cls, message: pb.TokenEvent) -> Self:
        """RequestError for stats or log-probabilities that are not the JSON they should be."""
        stats: dict[str, Any] | None = None
        if message.stats:
            stats = parse_json("stats", message.stats, dict)
        logprobs: Sequence[Any] = ()
        if message.logprobs:
            logprobs = parse_json("logprobs", message.logprobs, list)
        return cls(
            rid=message.rid,
            attempt=message.attempt,
            index=message.index,
            token=message.token if message.HasField("token") else None,
            finish_reason=message.finish_reason,
            error=_error_from_proto(message.error)
            if message.HasField("error")
            else None,
            stats=stats,
            logprobs=logprobs,
        )


@dataclass(frozen=True)
class StepEvents:
    """One message of a worker's event stream: the events of an engine step, and its load."""

    events: tuple[TokenEvent, ...] = ()
    load: Load = Load()

    def to_proto(self) -> pb.EventsResponse:
        events = [event.to_proto() for event in self.events]
        return pb.EventsResponse(events=events, load=self.load.to_proto())

    @classmethod
    def from_proto(cls, message: pb.EventsResponse) -> Self:
        """RequestError for an event or a load that is none."""
        events = tuple(TokenEvent.from_proto(event) for event in message.events)
        return cls(events=events, load=Load.from_proto(message.load))


@dataclass(frozen=True)
class WorkerStatus:
    """State of a worker: gauges by name, anything else as `info`; `speaks` as in WorkerInfo."""

    epoch: int
    gauges: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    speaks: tuple[str, ...] = VERSIONS

    def to_proto(self) -> pb.StatusResponse:
        return pb.StatusResponse(
            epoch=self.epoch,
            gauges=self.gauges,
            info=json.dumps(self.info),
            speaks=self.speaks,
        )

    @classmethod
    def from_proto(cls, message: pb.StatusResponse) -> Self:
        """RequestError for info that is no JSON object."""
        info: dict[str, Any] = {}
        if message.info:
            info = parse_json("info", message.info, dict)
        return cls(
            epoch=message.epoch,
            gauges=dict(message.gauges),
            info=info,
            speaks=tuple(message.speaks),
        )


# -- sender and receiver

KV_SERVICE = "disagg.v1.KvTransferService"


@dataclass(frozen=True)
class Attach:
    """A sender takes over a part of a reservation.

    model, plan: fingerprints, equal on both sides; the plan is that of a part
    """

    ticket: Ticket
    model: str
    plan: str
    tokens: int
    direct: bool = False

    def to_proto(self) -> kv.AttachRequest:
        return kv.AttachRequest(
            ticket=ticket_to_proto(self.ticket),
            model=self.model,
            plan=self.plan,
            tokens=self.tokens,
            direct=self.direct,
        )

    @classmethod
    def from_proto(cls, message: kv.AttachRequest) -> Self:
        return cls(
            ticket=ticket_from_proto(message.ticket),
            model=message.model,
            plan=message.plan,
            tokens=message.tokens,
            direct=message.direct,
        )


@dataclass(frozen=True)
class Attached:
    """The receiver's answer: which items it has verified, or that the hand-off was admitted.

    admitted: everything arrived before; the sender repeats its commit to get the answer
    have:     indices of the items, in the order of `records.Manifest`, and their `digests`
    lease_s:  the reservation ends this long after the sender's last sign of life
    credit:   bytes of frames that may be in flight
    port, key: where a direct connection is accepted; port 0: nowhere
    """

    admitted: bool = False
    have: Sequence[int] = ()
    digests: Sequence[int] = ()
    lease_s: float = 0.0
    credit: int = 0
    port: int = 0
    key: bytes = b""

    def received(self) -> dict[int, int]:
        """Digests by item index; CorruptFrameError unless each item has one."""
        if len(self.have) != len(self.digests):
            raise CorruptFrameError(
                f"{len(self.digests)} digests of {len(self.have)} items"
            )
        return dict(zip(self.have, self.digests, strict=True))

    def to_proto(self) -> kv.AttachResponse:
        return kv.AttachResponse(
            admitted=self.admitted,
            have=self.have,
            digests=self.digests,
            lease_s=self.lease_s,
            credit=self.credit,
            port=self.port,
            key=self.key,
        )

    @classmethod
    def from_proto(cls, message: kv.AttachResponse) -> Self:
        return cls(
            admitted=message.admitted,
            have=tuple(message.have),
            digests=tuple(message.digests),
            lease_s=message.lease_s,
            credit=message.credit,
            port=message.port,
            key=message.key,
        )


@dataclass(frozen=True)
class FrameAnswer:
    """The answer to one frame: stored, or dropped with an error. Either way another may follow.

    gen: of the attachment that sent the frame; 0: the stream itself failed
    """

    nonce: int
    gen: int
    error: DisaggError | None = None

    def to_proto(self) -> kv.PushResponse:
        return kv.PushResponse(
            nonce=self.nonce,
            gen=self.gen,
            error=_error_to_proto(self.error),
        )

    @classmethod
    def from_proto(cls, message: kv.PushResponse) -> Self:
        error = _error_from_proto(message.error) if message.HasField("error") else None
        return cls(nonce=message.nonce, gen=message.gen, error=error)


@dataclass(frozen=True)
class Ack:
    """The part is complete; with the last one, the engine has the prompt.

    Times as the receiver measured them.
    """

    verify_ms: float = 0.0
    admit_ms: float = 0.0

    def to_proto(self) -> kv.CommitResponse:
        return kv.CommitResponse(verify_ms=self.verify_ms, admit_ms=self.admit_ms)

    @classmethod
    def from_proto(cls, message: kv.CommitResponse) -> Self:
        return cls(verify_ms=message.verify_ms, admit_ms=message.admit_ms)


# -- fields that several messages have, to protobuf and back


def ticket_to_proto(ticket: Ticket) -> kv.Ticket:
    return kv.Ticket(nonce=ticket.nonce, epoch=ticket.epoch, gen=ticket.gen)


def ticket_from_proto(message: kv.Ticket) -> Ticket:
    return Ticket(nonce=message.nonce, epoch=message.epoch, gen=message.gen)


def _error_to_proto(error: DisaggError | None) -> kv.Error | None:
    """None, which leaves the field absent, for no error."""
    if error is None:
        return None
    return kv.Error(reason=error.reason, message=str(error))


def _error_from_proto(message: kv.Error) -> DisaggError:
    return error_from(message.reason, message.message)


_WORK_BY_NUMBER = {pb.Work.Value(f"WORK_{work.name}"): work for work in Work}
_ROLE_BY_NUMBER = {pb.Role.Value(f"ROLE_{role.name}"): role for role in Role}


def _work_from_proto(number: int) -> Work:
    if number not in _WORK_BY_NUMBER:
        raise RequestError(
            f"unknown WORK {number}; known: {', '.join(_WORK_BY_NUMBER.values())}"
        )
    return _WORK_BY_NUMBER[number]


def _role_from_proto(number: int) -> Role:
    if number not in _ROLE_BY_NUMBER:
        raise RequestError(
            f"unknown ROLE {number}; known: {', '.join(_ROLE_BY_NUMBER.values())}"
        )
    return _ROLE_BY_NUMBER[number]


def parse_json(name: str, text: str, expected: type[Json]) -> Json:
    """The JSON value of a text that is not empty; RequestError if it is of another type."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, expected):
        raise RequestError(
            f"{name} is a {type(value).__name__}; expected a {expected.__name__}"
        )
    return value
