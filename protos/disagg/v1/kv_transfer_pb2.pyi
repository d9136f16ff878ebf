from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ticket(_message.Message):
    __slots__ = ("nonce", "epoch", "gen")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GEN_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    epoch: int
    gen: int
    def __init__(self, nonce: _Optional[int] = ..., epoch: _Optional[int] = ..., gen: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("ticket", "model", "plan", "tokens", "direct")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    model: str
    plan: str
    tokens: int
    direct: bool
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., model: _Optional[str] = ..., plan: _Optional[str] = ..., tokens: _Optional[int] = ..., direct: bool = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("admitted", "have", "digests", "lease_s", "credit", "port", "key")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    have: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    lease_s: float
    credit: int
    port: int
    key: bytes
    def __init__(self, admitted: bool = ..., have: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., lease_s: _Optional[float] = ..., credit: _Optional[int] = ..., port: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    def __init__(self, frame: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("nonce", "gen", "error")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    GEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    gen: int
    error: Error
    def __init__(self, nonce: _Optional[int] = ..., gen: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("tickets",)
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    tickets: _containers.RepeatedCompositeFieldContainer[Ticket]
    def __init__(self, tickets: _Optional[_Iterable[_Union[Ticket, _Mapping]]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("over",)
    OVER_FIELD_NUMBER: _ClassVar[int]
    over: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, over: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    def __init__(self, frame: _Optional[bytes] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("verify_ms", "admit_ms")
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_MS_FIELD_NUMBER: _ClassVar[int]
    verify_ms: float
    admit_ms: float
    def __init__(self, verify_ms: _Optional[float] = ..., admit_ms: _Optional[float] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
