"""What routers, senders and receivers tell each other: plain data, and its protobuf form.

    router ── Job: Reserve, Submit, Abort ──► worker ── Step: events and Load ──► router
    prefill ── Ticket: Attach, frames, Renew, Commit ──► decode ── Attached, credit, Ack ──► prefill

The .proto files say what each field means; here stands what Python has besides. What comes from a
peer is checked here: RequestError for what no honest peer sends.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import DecodeError, Message

from disagg.config import EngineConfig
from disagg.errors import CorruptFrameError, DisaggError, RequestError, error_from
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.protos.v1 import worker_pb2 as pb
from disagg.wire import Ticket

Parsed = TypeVar("Parsed", bound=Message)


def parse(message: type[Parsed], data: bytes) -> Parsed:
    """A protobuf message from a peer; RequestError if the bytes are none."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise RequestError(
            f"{len(data)} bytes are no {message.DESCRIPTOR.name}"
        ) from error


class ProtoMessage:
    """A dataclass that crosses as the protobuf message `form`, whose fields have its names."""

    _form: ClassVar[Any]

    def __init_subclass__(cls, form: type[Message]):
        cls._form = form

    def to_message(self) -> Any:
        return fill(self._form, **vars(self))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """RequestError for what no honest peer sends."""
        return cls(**read(message))


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
    room:       tokens of its own codec that its arena holds
    step_tokens: of prompts, the most that it computes in one step
    sizes:      bytes of two prompts, by tokens, under each listed codec
    """

    name: str
    role: Role
    address: str
    epoch: int
    model: str = ""
    min_tokens: int = 0
    room: int = 0
    step_tokens: int = EngineConfig.max_batch_tokens
    sizes: Mapping[str, Mapping[int, int]] = field(default_factory=dict, hash=False)

    def bytes_of(self, codec: str, tokens: int) -> float:
        """Of a prompt, on the line through those two; under another name, of who names none."""
        first = next(iter(self.sizes.values()), {0: 0, 1: 0})
        (short, few), (long, many) = self.sizes.get(codec, first).items()
        return few + (many - few) * (tokens - short) / (long - short)


def serves(roles: Collection[Role]) -> bool:
    """Whether workers of these roles can answer a prompt."""
    return any(role.prefills for role in roles) and any(role.decodes for role in roles)


@dataclass(frozen=True)
class Job(ProtoMessage, form=pb.Job):
    """One attempt of a request, as its workers know it. `sampling`: by the names of the engine.

    moved:    tokens in the records of a sequence that moves while it decodes; 0: of the prompt
    waited_s: that the request is old when the attempt begins
    """

    rid: str
    attempt: int
    prompt: tuple[int, ...]
    emitted: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    codec: str = ""
    deadline_s: float = 300.0
    moved: int = 0
    waited_s: float = 0.0

    @property
    def tokens(self) -> int:
        """How many tokens its records hold when they are handed over."""
        return self.moved or len(self.prompt)

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"attempt {self.attempt} of {self.rid}"


@dataclass(frozen=True)
class Grant(ProtoMessage, form=pb.ReserveResponse):
    """A reservation: what the router hands to the prefill worker."""

    nonce: int
    epoch: int


@dataclass(frozen=True)
class Submit(ProtoMessage, form=pb.SubmitRequest):
    """A job for a worker; where it is no local work, with the reservation at a decode worker."""

    job: Job
    work: Work
    epoch: int
    decode_address: str = ""
    decode_epoch: int = 0
    nonce: int = 0
    router: str = ""


@dataclass(frozen=True)
class Load(ProtoMessage, form=pb.Load):
    """What a worker could take now: bytes and sequences; and those that wait for room.

    role: what it admits; None: as when it started
    """

    free_bytes: int = 0
    slots: int = 0
    waiting: int = 0
    role: Role | None = None


@dataclass(frozen=True)
class TokenEvent(ProtoMessage, form=pb.TokenEvent):
    """Something happened to a request: a token, the end, an error, or figures.

    stats:    figures of the hand-off, by the names of `metrics.HandoffStats`
    logprobs: of the token, where they are wanted; before them those of the prompt. Each is its own,
              then pairs of the likeliest tokens and theirs
    """

    rid: str
    attempt: int
    index: int
    token: int | None = None
    finish_reason: str = ""
    error: DisaggError | None = None
    stats: Mapping[str, Any] | None = None
    logprobs: Sequence[Any] = ()


@dataclass(frozen=True)
class StepEvents(ProtoMessage, form=pb.EventsResponse):
    """What a worker says at once: the events of an engine step, and what it could take now."""

    events: tuple[TokenEvent, ...] = ()
    load: Load = Load()


@dataclass(frozen=True)
class WorkerStatus(ProtoMessage, form=pb.StatusResponse):
    """What a worker is and how busy: gauges by name, anything else as `info`."""

    epoch: int
    gauges: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


# -- sender and receiver

KV_SERVICE = "disagg.v1.KvTransferService"


@dataclass(frozen=True)
class Attach(ProtoMessage, form=kv.AttachRequest):
    """A sender takes over a reservation. `model`, `plan`: fingerprints, equal on both sides."""

    ticket: Ticket
    model: str
    plan: str
    tokens: int
    direct: bool = False


@dataclass(frozen=True)
class Attached(ProtoMessage, form=kv.AttachResponse):
    """The answer: what is here, verified; or that all was, so that the commit can be repeated.

    have: places of items in the order of `records.Checklist`, and their `digests`
    """

    admitted: bool = False
    have: Sequence[int] = ()
    digests: Sequence[int] = ()
    lease_s: float = 0.0
    credit: int = 0
    port: int = 0
    key: bytes = b""

    def here(self) -> dict[int, int]:
        """The digests by place; CorruptFrameError unless each has one."""
        if len(self.have) != len(self.digests):
            raise CorruptFrameError(
                f"{len(self.digests)} digests of {len(self.have)} items"
            )
        return dict(zip(self.have, self.digests, strict=True))


@dataclass(frozen=True)
class Credit(ProtoMessage, form=kv.PushResponse):
    """What became of a frame of one attachment; another one may be sent in its place."""

    nonce: int
    gen: int
    error: DisaggError | None = None


@dataclass(frozen=True)
class Ack(ProtoMessage, form=kv.CommitResponse):
    """The hand-off is complete and the engine has it. Milliseconds as the receiver measured."""

    verify_ms: float = 0.0
    admit_ms: float = 0.0


# -- to protobuf and back, field by field

Form = tuple[
    Callable[[Any], Any], Callable[[Any], Any]
]  # to what protobuf has, and back


def fill(form: type[Parsed], **values: Any) -> Parsed:
    """A message of these fields; None for one that is absent."""
    forms, there = (
        _forms(form.DESCRIPTOR),
        {x: y for x, y in values.items() if y is not None},
    )
    return form(**{name: forms[name][0](value) for name, value in there.items()})


def read(message: Message) -> dict[str, Any]:
    """The fields of a message; None for one that is absent."""
    fields = message.DESCRIPTOR.fields_by_name
    return {
        name: None
        if fields[name].containing_oneof and not message.HasField(name)
        else back(getattr(message, name))
        for name, (_, back) in _forms(message.DESCRIPTOR).items()
    }


@cache
def _forms(descriptor: Descriptor) -> dict[str, Form]:
    found = {}
    for x in descriptor.fields:
        is_map = x.message_type is not None and x.message_type.GetOptions().map_entry
        usual = (_same, dict if is_map else tuple if x.is_repeated else _same)
        found[x.name] = usual if is_map else _FORMS.get(x.name, usual)
    return found


def _same(value: Any) -> Any:
    return value


def _words(prefix: str, enum: EnumTypeWrapper, words: Iterable[StrEnum]) -> Form:
    """Words that protobuf has in capitals behind a prefix."""
    numbers = {word: enum.Value(f"{prefix}_{word.name}") for word in words}
    known = {number: word for word, number in numbers.items()}

    def back(number: int) -> StrEnum:
        if number in known:
            return known[number]
        raise RequestError(
            f"unknown {prefix} {number}; known: {', '.join(known.values())}"
        )

    return numbers.get, back


def _part(kind: type[ProtoMessage]) -> Form:
    return kind.to_message, kind.from_message


def _several(form: Form) -> Form:
    return lambda some: list(map(form[0], some)), lambda some: tuple(map(form[1], some))


def _json(what: str, kind: type, none: Callable[[], Any]) -> Form:
    """Plain values as JSON; `none`: what no text means."""

    def back(text: str) -> Any:
        try:
            found = json.loads(text) if text else none()
        except ValueError as error:
            raise RequestError(f"{what} is no JSON: {error}") from error
        if text and not isinstance(found, kind):
            raise RequestError(
                f"{what} is a {type(found).__name__}; a {kind.__name__} is wanted"
            )
        return found

    return lambda value: json.dumps(value) if value or value == {} else "", back


_TICKET = (
    lambda ticket: kv.Ticket(**vars(ticket)),
    lambda message: Ticket(**read(message)),
)
_FORMS: dict[str, Form] = {  # by the names of fields, which mean the same everywhere
    "job": _part(Job),
    "load": _part(Load),
    "events": _several(_part(TokenEvent)),
    "error": (
        lambda error: {"reason": error.reason, "message": str(error)},
        lambda message: error_from(message.reason, message.message),
    ),
    "ticket": _TICKET,
    "tickets": _several(_TICKET),
    "work": _words("WORK", pb.Work, Work),
    "role": _words("ROLE", pb.Role, Role),
    "sampling": _json("sampling", dict, dict),
    "info": _json("info", dict, dict),
    "stats": _json("stats", dict, lambda: None),
    "logprobs": _json("logprobs", list, tuple),
}
