from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_PAGE: _ClassVar[Kind]
    KIND_SEGMENT: _ClassVar[Kind]
    KIND_SIDE: _ClassVar[Kind]
    KIND_RAW: _ClassVar[Kind]

class HandoffState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOFF_STATE_UNSPECIFIED: _ClassVar[HandoffState]
    HANDOFF_STATE_ATTACHED: _ClassVar[HandoffState]
    HANDOFF_STATE_ADMITTED: _ClassVar[HandoffState]
    HANDOFF_STATE_EXPIRED: _ClassVar[HandoffState]
KIND_UNSPECIFIED: Kind
KIND_PAGE: Kind
KIND_SEGMENT: Kind
KIND_SIDE: Kind
KIND_RAW: Kind
HANDOFF_STATE_UNSPECIFIED: HandoffState
HANDOFF_STATE_ATTACHED: HandoffState
HANDOFF_STATE_ADMITTED: HandoffState
HANDOFF_STATE_EXPIRED: HandoffState

class ItemSet(_message.Message):
    __slots__ = ("kind", "group", "layer", "records", "digests")
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    group: int
    layer: int
    records: _containers.RepeatedScalarFieldContainer[int]
    digests: bytes
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., group: _Optional[int] = ..., layer: _Optional[int] = ..., records: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("nonce", "epoch", "gen")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GEN_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    epoch: int
    gen: int
    def __init__(self, nonce: _Optional[int] = ..., epoch: _Optional[int] = ..., gen: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("rid", "attempt", "epoch", "tokens", "model", "plan", "wait_s", "keys", "spec")
    RID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    rid: str
    attempt: int
    epoch: int
    tokens: int
    model: str
    plan: str
    wait_s: float
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    spec: str
    def __init__(self, rid: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., tokens: _Optional[int] = ..., model: _Optional[str] = ..., plan: _Optional[str] = ..., wait_s: _Optional[float] = ..., keys: _Optional[_Iterable[bytes]] = ..., spec: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("nonce", "epoch", "lease_s", "offered", "cached")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    epoch: int
    lease_s: float
    offered: _containers.RepeatedCompositeFieldContainer[ItemSet]
    cached: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, nonce: _Optional[int] = ..., epoch: _Optional[int] = ..., lease_s: _Optional[float] = ..., offered: _Optional[_Iterable[_Union[ItemSet, _Mapping]]] = ..., cached: _Optional[_Iterable[int]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("state", "have", "lease_s", "push_port")
    STATE_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    PUSH_PORT_FIELD_NUMBER: _ClassVar[int]
    state: HandoffState
    have: _containers.RepeatedCompositeFieldContainer[ItemSet]
    lease_s: float
    push_port: int
    def __init__(self, state: _Optional[_Union[HandoffState, str]] = ..., have: _Optional[_Iterable[_Union[ItemSet, _Mapping]]] = ..., lease_s: _Optional[float] = ..., push_port: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    def __init__(self, frame: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("credit", "ack", "nack")
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    credit: Credit
    ack: Ack
    nack: Nack
    def __init__(self, credit: _Optional[_Union[Credit, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("bytes", "frames")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    frames: int
    def __init__(self, bytes: _Optional[int] = ..., frames: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("verify_ms", "admit_ms")
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_MS_FIELD_NUMBER: _ClassVar[int]
    verify_ms: float
    admit_ms: float
    def __init__(self, verify_ms: _Optional[float] = ..., admit_ms: _Optional[float] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedCompositeFieldContainer[ItemSet]
    def __init__(self, missing: _Optional[_Iterable[_Union[ItemSet, _Mapping]]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    def __init__(self, frame: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("ack", "nack")
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    ack: Ack
    nack: Nack
    def __init__(self, ack: _Optional[_Union[Ack, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("rid", "attempt", "reason")
    RID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rid: str
    attempt: int
    reason: str
    def __init__(self, rid: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("push_port",)
    PUSH_PORT_FIELD_NUMBER: _ClassVar[int]
    push_port: int
    def __init__(self, push_port: _Optional[int] = ...) -> None: ...

class AbsorbRequest(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class AbsorbResponse(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...
