"""Pairs of workers that cannot hand over to each other: other versions, model or layouts.

What a worker says of itself (`WorkerInfo.speaks`) has to be equal. A mismatch that shows only in a
hand-off is remembered. It is no failure of either worker: each may fit another one.
"""

from collections.abc import Iterable

from disagg.errors import DisaggError, LayoutError, VersionError
from disagg.router.worker_state import WorkerState
from disagg.transfer.messages import Role

MISMATCHES = (LayoutError, VersionError)


class Mismatches:
    """The pairs whose hand-offs were refused, until one of the two is replaced.

    A mismatch of all pairs is final if no pair has ever fitted: the service is not set up right.
    Otherwise an upgrade is under way, and requests wait for the next worker.
    """

    def __init__(self) -> None:
        # (sender, receiver, codec)
        self._pairs: set[tuple[str, str, str]] = set()
        self._have_fitted = False
        # why no pair can hand over, if that is final, and why none can with a codec
        self._error: DisaggError | None = None
        self._codec_errors: dict[str, DisaggError] = {}

    @property
    def are_final(self) -> bool:
        """Whether some requests cannot be handed over by any pair."""
        return self._error is not None or bool(self._codec_errors)

    def error_of(self, codec: str) -> DisaggError | None:
        """Why no pair can hand over KV of a codec; None if some pair may."""
        return self._error or self._codec_errors.get(codec)

    def update(self, workers: Iterable[WorkerState]) -> None:
        """Other workers take part, or in other roles."""
        workers = list(workers)
        error = mismatch_of(workers)
        if error is None and all(_by_role(workers)):
            self._have_fitted = True
        self._error = None if self._have_fitted else error
        self._codec_errors.clear()

    def add(self, sender: str, receiver: str, codec: str) -> bool:
        """The pair cannot hand over KV of this codec; whether that is new."""
        pair = sender, receiver, codec
        is_new = pair not in self._pairs
        self._pairs.add(pair)
        return is_new

    def forget(self, worker: str) -> None:
        """A worker was replaced; the new one may fit."""
        self._pairs = {pair for pair in self._pairs if worker not in pair[:2]}

    def fitting(
        self, sender: WorkerState, receivers: Iterable[WorkerState], codec: str
    ) -> list[WorkerState]:
        """The workers that a sender can hand over to."""
        speaks = sender.info.speaks
        equals = [receiver for receiver in receivers if receiver.info.speaks == speaks]
        if not self._pairs:
            return equals
        return [x for x in equals if (sender.name, x.name, codec) not in self._pairs]

    def exclude_all(
        self, workers: Iterable[WorkerState], codec: str, error: DisaggError
    ) -> bool:
        """Whether this last error leaves no pair that can hand over KV of a codec."""
        prefills, decodes = _by_role(workers)
        if any(self.fitting(prefill, decodes, codec) for prefill in prefills):
            return False
        self._codec_errors[codec] = error
        return True


def mismatch_of(workers: Iterable[WorkerState]) -> DisaggError | None:
    """Why no prefill worker speaks what a decode worker speaks; None if one does.

    None too without workers of both roles: they may be on their way.
    """
    prefills, decodes = _by_role(workers)
    if not prefills or not decodes:
        return None
    spoken = {worker.info.speaks for worker in decodes}
    if any(worker.info.speaks in spoken for worker in prefills):
        return None
    prefill, decode = prefills[0], decodes[0]
    only_one = set(prefill.info.speaks) ^ set(decode.info.speaks)
    is_version = any(x.startswith(("control ", "wire ")) for x in only_one)
    kind = VersionError if is_version else LayoutError
    return kind(
        f"no {Role.PREFILL} worker can hand over to a {Role.DECODE} worker: {prefill.name} speaks"
        f" {_lacking(prefill, decode)}, {decode.name} {_lacking(decode, prefill)}; they need the"
        " same release, model and settings"
    )


def _by_role(
    workers: Iterable[WorkerState],
) -> tuple[list[WorkerState], list[WorkerState]]:
    """The workers that prefill, and those that decode."""
    workers = list(workers)
    prefills = [worker for worker in workers if worker.info.role.prefills]
    decodes = [worker for worker in workers if worker.info.role.decodes]
    return prefills, decodes


def _lacking(worker: WorkerState, other: WorkerState) -> str:
    """What a worker speaks and the other one does not."""
    return ", ".join(x for x in worker.info.speaks if x not in other.info.speaks)
