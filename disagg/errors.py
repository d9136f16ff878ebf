"""Every error a user, a file or a peer can cause, drawn as one tree.

DisaggError
├── ConfigError                 an option, spec or file that cannot be used
│   ├── UnknownNameError        an unknown codec, option or key; lists the known ones
│   ├── AuthError               a key that is missing or wrong
│   ├── OccupiedError           workers still run with other settings, or for another service
│   └── ModelError              a model that is missing or cannot be served
├── RequestError                a request that can never succeed as written
│   ├── TooLargeError           a body longer than the limit
│   ├── PromptTooLongError      more tokens than the context or the pool can hold
│   ├── HandleError             an unusable handle of a prompt that another worker has
│   └── CancelledError          the client left, or pressed Ctrl-C
├── LayoutError                 bytes that belong to another layout, model or plan
├── WireError                   bytes from a peer that are not what they claim
│   ├── CorruptFrameError       a checksum or digest does not match, or a frame is cut short
│   └── VersionError            a frame of another format version
├── CapacityError               no room now; there may be later
│   └── QueueFullError          too many requests wait already
└── TransferError               a hand-off that did not complete
    ├── ReservationError        a reservation that is unknown or expired
    │   └── AbortedError        one that was given up, or superseded: nothing failed
    ├── PeerLostError           the other side is gone or does not answer
    │   ├── StoppingError       the service is shutting down; another one may take the request
    │   └── RanksLostError      a rank of a worker's group has ended or hangs
    └── DeadlineError           the work did not end in the time it was given

Each class says how it looks from outside: a gRPC status name, an HTTP status, an exit code.
Messages say what was wrong, the value seen, and what would be right.
"""

from collections.abc import Iterable
from typing import ClassVar, Self

MAX_QUOTED_CHARS = 100  # of a user's text, in an error message


class DisaggError(Exception):
    """The root. `reason` is the stable name of the error for peers, logs and metrics.

    param: the field of a client's request that caused it, if one did
    """

    reason: ClassVar[str] = "internal"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str = "", param: str | None = None):
        super().__init__(message)
        self.param = param


class ConfigError(DisaggError):
    reason = "config"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 2


class UnknownNameError(ConfigError):
    """A name that does not exist; the message lists those that do."""

    reason = "unknown_name"

    @classmethod
    def of(cls, what: str, name: str, known_names: Iterable[str]) -> Self:
        return cls(
            f"unknown {what} {quoted(name)}; known: {', '.join(sorted(known_names))}"
        )


class AuthError(ConfigError):
    reason = "auth"
    http_status = 401


class OccupiedError(ConfigError):
    reason = "occupied"


class ModelError(ConfigError):
    reason = "model"
    http_status = 404
    exit_code = 3


class RequestError(DisaggError):
    reason = "request"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    exit_code = 4


class TooLargeError(RequestError):
    reason = "too_large"
    http_status = 413


class PromptTooLongError(RequestError):
    reason = "prompt_too_long"


class HandleError(RequestError):
    reason = "handle"
    http_status = 409

    def __init__(self, message: str = "", param: str | None = "kv_transfer_params"):
        super().__init__(message, param)


class CancelledError(RequestError):
    reason = "cancelled"
    grpc_status = "CANCELLED"
    http_status = 499
    exit_code = 130


class LayoutError(DisaggError):
    reason = "layout"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 502
    exit_code = 5


class WireError(DisaggError):
    reason = "wire"
    grpc_status = "DATA_LOSS"
    http_status = 502
    exit_code = 6


class CorruptFrameError(WireError):
    reason = "corrupt_frame"


class VersionError(WireError):
    reason = "version"
    grpc_status = "FAILED_PRECONDITION"


class CapacityError(DisaggError):
    reason = "capacity"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 503
    exit_code = 7


class QueueFullError(CapacityError):
    reason = "queue_full"
    http_status = 429


class TransferError(DisaggError):
    reason = "transfer"
    grpc_status = "ABORTED"
    http_status = 502
    exit_code = 8


class ReservationError(TransferError):
    reason = "reservation"
    grpc_status = "FAILED_PRECONDITION"


class AbortedError(ReservationError):
    reason = "aborted"


class PeerLostError(TransferError):
    reason = "peer_lost"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class StoppingError(PeerLostError):
    reason = "stopping"


class RanksLostError(PeerLostError):
    reason = "ranks_lost"


class DeadlineError(TransferError):
    reason = "deadline"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


def quoted(text: str) -> str:
    """A user's text, for an error message; of a long one, the beginning."""
    if len(text) <= MAX_QUOTED_CHARS:
        return repr(text)
    return f"{text[:MAX_QUOTED_CHARS]!r}..."


def all_errors(root: type[DisaggError] = DisaggError) -> dict[str, type[DisaggError]]:
    """Every error class by its `reason`."""
    by_reason = {root.reason: root}
    for error in root.__subclasses__():
        by_reason.update(all_errors(error))
    return by_reason


def reason_of(error: Exception) -> str:
    """The name under which a failure is counted; "internal" for any other exception."""
    return error.reason if isinstance(error, DisaggError) else DisaggError.reason


def error_from(reason: str, message: str) -> DisaggError:
    """The exception that a peer named by `reason`; an unknown reason becomes a DisaggError."""
    return all_errors().get(reason, DisaggError)(message)
