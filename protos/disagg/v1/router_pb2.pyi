from disagg.protos.v1 import kv_transfer_pb2 as _kv_transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("door", "begins", "cancels", "counts")
    DOOR_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    door: str
    begins: _containers.RepeatedCompositeFieldContainer[Begin]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    counts: bytes
    def __init__(self, door: _Optional[str] = ..., begins: _Optional[_Iterable[_Union[Begin, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ..., counts: _Optional[bytes] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("handle", "prompt", "sampling", "codec", "prefill", "decode", "emitted", "waited_s", "resumed", "client", "prediction", "request_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: str
    codec: str
    prefill: str
    decode: str
    emitted: _containers.RepeatedScalarFieldContainer[int]
    waited_s: float
    resumed: bool
    client: str
    prediction: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    def __init__(self, handle: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[str] = ..., codec: _Optional[str] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ..., emitted: _Optional[_Iterable[int]] = ..., waited_s: _Optional[float] = ..., resumed: bool = ..., client: _Optional[str] = ..., prediction: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("handles", "tokens", "figures", "scores", "ends", "state")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    figures: _containers.RepeatedCompositeFieldContainer[Figures]
    scores: _containers.RepeatedCompositeFieldContainer[Scores]
    ends: _containers.RepeatedCompositeFieldContainer[End]
    state: RouterState
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., figures: _Optional[_Iterable[_Union[Figures, _Mapping]]] = ..., scores: _Optional[_Iterable[_Union[Scores, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[End, _Mapping]]] = ..., state: _Optional[_Union[RouterState, _Mapping]] = ...) -> None: ...

class Figures(_message.Message):
    __slots__ = ("handle", "waited_s", "kv", "codec")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    handle: int
    waited_s: float
    kv: str
    codec: str
    def __init__(self, handle: _Optional[int] = ..., waited_s: _Optional[float] = ..., kv: _Optional[str] = ..., codec: _Optional[str] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("position", "logprobs")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    position: int
    logprobs: str
    def __init__(self, position: _Optional[int] = ..., logprobs: _Optional[str] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("handle", "finish_reason", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    finish_reason: str
    error: _kv_transfer_pb2.Error
    def __init__(self, handle: _Optional[int] = ..., finish_reason: _Optional[str] = ..., error: _Optional[_Union[_kv_transfer_pb2.Error, _Mapping]] = ...) -> None: ...

class RouterState(_message.Message):
    __slots__ = ("ready", "lacks", "targets", "waiting", "lacks_room")
    class TargetsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LacksRoomEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    READY_FIELD_NUMBER: _ClassVar[int]
    LACKS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LACKS_ROOM_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    lacks: str
    targets: _containers.ScalarMap[str, int]
    waiting: int
    lacks_room: _containers.ScalarMap[str, str]
    def __init__(self, ready: bool = ..., lacks: _Optional[str] = ..., targets: _Optional[_Mapping[str, int]] = ..., waiting: _Optional[int] = ..., lacks_room: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: str
    def __init__(self, report: _Optional[str] = ...) -> None: ...

class ScrapeRequest(_message.Message):
    __slots__ = ("door", "counts")
    DOOR_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    door: str
    counts: bytes
    def __init__(self, door: _Optional[str] = ..., counts: _Optional[bytes] = ...) -> None: ...

class ScrapeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
