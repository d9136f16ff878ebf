from disagg.protos.v1 import kv_transfer_pb2 as _kv_transfer_pb2
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
    WORK_LOCAL: _ClassVar[Work]
    WORK_MOVE: _ClassVar[Work]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]
    ROLE_NONE: _ClassVar[Role]
WORK_UNSPECIFIED: Work
WORK_PREFILL: Work
WORK_LOCAL: Work
WORK_MOVE: Work
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_BOTH: Role
ROLE_NONE: Role

class Job(_message.Message):
    __slots__ = ("rid", "attempt", "prompt", "emitted", "sampling", "codec", "deadline_s", "moved", "waited_s", "prediction", "request_id")
    RID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    rid: str
    attempt: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    emitted: _containers.RepeatedScalarFieldContainer[int]
    sampling: str
    codec: str
    deadline_s: float
    moved: int
    waited_s: float
    prediction: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    def __init__(self, rid: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., emitted: _Optional[_Iterable[int]] = ..., sampling: _Optional[str] = ..., codec: _Optional[str] = ..., deadline_s: _Optional[float] = ..., moved: _Optional[int] = ..., waited_s: _Optional[float] = ..., prediction: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("job", "epoch", "router")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    job: Job
    epoch: int
    router: str
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., epoch: _Optional[int] = ..., router: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("nonce", "epoch")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    epoch: int
    def __init__(self, nonce: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("job", "work", "epoch", "decode_address", "decode_epoch", "nonce", "router")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    job: Job
    work: Work
    epoch: int
    decode_address: str
    decode_epoch: int
    nonce: int
    router: str
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., work: _Optional[_Union[Work, str]] = ..., epoch: _Optional[int] = ..., decode_address: _Optional[str] = ..., decode_epoch: _Optional[int] = ..., nonce: _Optional[int] = ..., router: _Optional[str] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("have", "router", "version")
    class HaveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HAVE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    have: _containers.ScalarMap[str, int]
    router: str
    version: int
    def __init__(self, have: _Optional[_Mapping[str, int]] = ..., router: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class EventsResponse(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    load: Load
    def __init__(self, events: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("free_bytes", "slots", "waiting", "role", "step", "stalled_s")
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    free_bytes: int
    slots: int
    waiting: int
    role: Role
    step: int
    stalled_s: float
    def __init__(self, free_bytes: _Optional[int] = ..., slots: _Optional[int] = ..., waiting: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., step: _Optional[int] = ..., stalled_s: _Optional[float] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("rid", "attempt", "index", "token", "finish_reason", "error", "stats", "logprobs")
    RID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    rid: str
    attempt: int
    index: int
    token: int
    finish_reason: str
    error: _kv_transfer_pb2.Error
    stats: str
    logprobs: str
    def __init__(self, rid: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token: _Optional[int] = ..., finish_reason: _Optional[str] = ..., error: _Optional[_Union[_kv_transfer_pb2.Error, _Mapping]] = ..., stats: _Optional[str] = ..., logprobs: _Optional[str] = ...) -> None: ...

class AcknowledgeRequest(_message.Message):
    __slots__ = ("have", "router")
    class HaveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HAVE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    have: _containers.ScalarMap[str, int]
    router: str
    def __init__(self, have: _Optional[_Mapping[str, int]] = ..., router: _Optional[str] = ...) -> None: ...

class AcknowledgeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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

class FenceRequest(_message.Message):
    __slots__ = ("epoch", "router")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    router: str
    def __init__(self, epoch: _Optional[int] = ..., router: _Optional[str] = ...) -> None: ...

class FenceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("epoch", "gauges", "info", "speaks")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    gauges: _containers.ScalarMap[str, float]
    info: str
    speaks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., gauges: _Optional[_Mapping[str, float]] = ..., info: _Optional[str] = ..., speaks: _Optional[_Iterable[str]] = ...) -> None: ...
