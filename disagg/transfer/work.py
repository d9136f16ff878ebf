"""What routers and workers tell each other about requests. Plain data, and its protobuf form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from disagg.errors import DisaggError, RequestError, error_from
from disagg.protos.v1 import worker_pb2 as pb


class Work(StrEnum):
    """What to do with a request."""

    PREFILL = "prefill"  # compute the prompt and hand it to a decode worker
    REPLAY = "replay"  # the same, and decode is forced through what was emitted
    LOCAL = "local"  # everything on this worker


_WORK = {
    Work.PREFILL: pb.WORK_PREFILL,
    Work.REPLAY: pb.WORK_REPLAY,
    Work.LOCAL: pb.WORK_LOCAL,
}
_WORK_BACK = {value: work for work, value in _WORK.items()}


@dataclass(frozen=True)
class Submit:
    """Work for a worker.

    rid, attempt:   the router's name of the request, and how often it was started
    epoch:          the incarnation of the worker that this is meant for
    prompt:         token ids
    emitted:        tokens that the client has already
    codec:          codec spec or plan; empty: the one of the worker
    sampling:       parameters by the names of the engine
    decode_address: "host:port" of the decode worker, with its `decode_epoch`; empty if local
    deadline_s:     seconds until the request is given up
    """

    rid: str
    attempt: int
    work: Work
    epoch: int
    prompt: tuple[int, ...]
    emitted: tuple[int, ...] = ()
    codec: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    decode_address: str = ""
    decode_epoch: int = 0
    deadline_s: float = 120.0

    def to_message(self) -> pb.SubmitRequest:
        """As protobuf."""
        values = vars(self) | {"work": _WORK[self.work], "sampling": json.dumps(self.sampling)}
        return pb.SubmitRequest(**values)

    @classmethod
    def from_message(cls, message: pb.SubmitRequest) -> Self:
        """From protobuf; RequestError for work that nobody knows."""
        if message.work not in _WORK_BACK:
            raise RequestError(f"unknown work {message.work}; known: {', '.join(Work)}")
        return cls(
            rid=message.rid,
            attempt=message.attempt,
            work=_WORK_BACK[message.work],
            epoch=message.epoch,
            prompt=tuple(message.prompt),
            emitted=tuple(message.emitted),
            codec=message.codec,
            sampling=_load(message.sampling, "sampling"),
            decode_address=message.decode_address,
            decode_epoch=message.decode_epoch,
            deadline_s=message.deadline_s,
        )


@dataclass(frozen=True)
class TokenEvent:
    """Something happened to a request: a token, the end, an error, or figures.

    index:         of the token among the outputs of the request
    token:         None where none was made
    finish_reason: "stop", "length", "abort"; empty while the request goes on
    error:         what ended the request
    stats:         figures of the hand-off
    """

    rid: str
    attempt: int
    index: int
    token: int | None = None
    finish_reason: str = ""
    error: DisaggError | None = None
    stats: Mapping[str, Any] | None = None

    def to_message(self) -> pb.TokenEvent:
        """As protobuf."""
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
        """From protobuf."""
        reason = message.error_reason
        return cls(
            rid=message.rid,
            attempt=message.attempt,
            index=message.index,
            token=message.token if message.HasField("token") else None,
            finish_reason=message.finish_reason,
            error=error_from(reason, message.error_message) if reason else None,
            stats=_load(message.stats, "stats") if message.stats else None,
        )


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker is and how busy: fingerprints, gauges by name, anything else as `info`."""

    epoch: int
    model: str
    plan: str
    gauges: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def to_message(self) -> pb.StatusResponse:
        """As protobuf."""
        return pb.StatusResponse(**vars(self) | {"info": json.dumps(self.info)})

    @classmethod
    def from_message(cls, message: pb.StatusResponse) -> Self:
        """From protobuf."""
        info = _load(message.info, "info")
        return cls(message.epoch, message.model, message.plan, dict(message.gauges), info)


def _load(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise RequestError(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"{what} is a {type(found).__name__}, not an object")
    return found
