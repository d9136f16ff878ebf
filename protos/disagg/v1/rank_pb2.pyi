from disagg.protos.v1 import kv_transfer_pb2 as _kv_transfer_pb2
from disagg.protos.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordPages(_message.Message):
    __slots__ = ("group", "kind", "pages")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    group: int
    kind: str
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., kind: _Optional[str] = ..., pages: _Optional[_Iterable[int]] = ...) -> None: ...

class CachedItems(_message.Message):
    __slots__ = ("part", "places", "digests")
    PART_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    part: int
    places: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, part: _Optional[int] = ..., places: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenPartsRequest(_message.Message):
    __slots__ = ("nonce", "codec", "tokens", "moves", "senders", "records", "cached")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    codec: str
    tokens: int
    moves: bool
    senders: int
    records: _containers.RepeatedCompositeFieldContainer[RecordPages]
    cached: _containers.RepeatedCompositeFieldContainer[CachedItems]
    def __init__(self, nonce: _Optional[int] = ..., codec: _Optional[str] = ..., tokens: _Optional[int] = ..., moves: bool = ..., senders: _Optional[int] = ..., records: _Optional[_Iterable[_Union[RecordPages, _Mapping]]] = ..., cached: _Optional[_Iterable[_Union[CachedItems, _Mapping]]] = ...) -> None: ...

class OpenPartsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachPartRequest(_message.Message):
    __slots__ = ("attach",)
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    attach: _kv_transfer_pb2.AttachRequest
    def __init__(self, attach: _Optional[_Union[_kv_transfer_pb2.AttachRequest, _Mapping]] = ...) -> None: ...

class AttachPartResponse(_message.Message):
    __slots__ = ("attached",)
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    attached: _kv_transfer_pb2.AttachResponse
    def __init__(self, attached: _Optional[_Union[_kv_transfer_pb2.AttachResponse, _Mapping]] = ...) -> None: ...

class CheckPartRequest(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    def __init__(self, frame: _Optional[bytes] = ...) -> None: ...

class CheckPartResponse(_message.Message):
    __slots__ = ("verify_ms",)
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    verify_ms: float
    def __init__(self, verify_ms: _Optional[float] = ...) -> None: ...

class ClosePartsRequest(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class ClosePartsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SendPartsRequest(_message.Message):
    __slots__ = ("submit", "name")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    submit: _worker_pb2.SubmitRequest
    name: str
    def __init__(self, submit: _Optional[_Union[_worker_pb2.SubmitRequest, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class SendPartsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishPartsRequest(_message.Message):
    __slots__ = ("name", "first_token", "deadline_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    first_token: int
    deadline_s: float
    def __init__(self, name: _Optional[str] = ..., first_token: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class FinishPartsResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: str
    def __init__(self, stats: _Optional[str] = ...) -> None: ...

class StopPartsRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class StopPartsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadDigestsRequest(_message.Message):
    __slots__ = ("starts", "sizes")
    STARTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, starts: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadDigestsResponse(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digests: _Optional[_Iterable[int]] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
