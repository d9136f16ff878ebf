from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Work(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORK_UNSPECIFIED: _ClassVar[Work]
    WORK_PREFILL: _ClassVar[Work]
    WORK_REPLAY: _ClassVar[Work]
    WORK_LOCAL: _ClassVar[Work]
WORK_UNSPECIFIED: Work
WORK_PREFILL: Work
WORK_REPLAY: Work
WORK_LOCAL: Work

class SubmitRequest(_message.Message):
    __slots__ = ("rid", "attempt", "work", "prompt", "emitted", "sampling", "decode_address", "decode_epoch", "deadline_s", "epoch", "codec")
    RID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    rid: str
    attempt: int
    work: Work
    prompt: _containers.RepeatedScalarFieldContainer[int]
    emitted: _containers.RepeatedScalarFieldContainer[int]
    sampling: str
    decode_address: str
    decode_epoch: int
    deadline_s: float
    epoch: int
    codec: str
    def __init__(self, rid: _Optional[str] = ..., attempt: _Optional[int] = ..., work: _Optional[_Union[Work, str]] = ..., prompt: _Optional[_Iterable[int]] = ..., emitted: _Optional[_Iterable[int]] = ..., sampling: _Optional[str] = ..., decode_address: _Optional[str] = ..., decode_epoch: _Optional[int] = ..., deadline_s: _Optional[float] = ..., epoch: _Optional[int] = ..., codec: _Optional[str] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("have",)
    class HaveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HAVE_FIELD_NUMBER: _ClassVar[int]
    have: _containers.ScalarMap[str, int]
    def __init__(self, have: _Optional[_Mapping[str, int]] = ...) -> None: ...

class EventsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("rid", "attempt", "index", "token", "finish_reason", "error_reason", "error_message", "stats")
    RID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    rid: str
    attempt: int
    index: int
    token: int
    finish_reason: str
    error_reason: str
    error_message: str
    stats: str
    def __init__(self, rid: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token: _Optional[int] = ..., finish_reason: _Optional[str] = ..., error_reason: _Optional[str] = ..., error_message: _Optional[str] = ..., stats: _Optional[str] = ...) -> None: ...

class AcknowledgeRequest(_message.Message):
    __slots__ = ("have",)
    class HaveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HAVE_FIELD_NUMBER: _ClassVar[int]
    have: _containers.ScalarMap[str, int]
    def __init__(self, have: _Optional[_Mapping[str, int]] = ...) -> None: ...

class AcknowledgeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerServiceAbortRequest(_message.Message):
    __slots__ = ("rid", "attempt", "reason")
    RID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rid: str
    attempt: int
    reason: str
    def __init__(self, rid: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkerServiceAbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class FenceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("epoch", "model", "plan", "gauges", "info")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    model: str
    plan: str
    gauges: _containers.ScalarMap[str, float]
    info: str
    def __init__(self, epoch: _Optional[int] = ..., model: _Optional[str] = ..., plan: _Optional[str] = ..., gauges: _Optional[_Mapping[str, float]] = ..., info: _Optional[str] = ...) -> None: ...
