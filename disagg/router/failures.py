"""What a failure costs: the worker, whose breaker may open, and the request, which may be over."""

import logging
from collections.abc import Iterable, Mapping

from disagg.errors import (
    CapacityError,
    ConfigError,
    DisaggError,
    RequestError,
    TransferError,
)
from disagg.router.request_state import RequestState
from disagg.router.worker_state import WorkerState

# pause of a request after a refusal, doubled up to the maximum
RETRY_S = 0.1
MAX_RETRY_S = 1.0
# another worker would fail in the same way
PERMANENT = (RequestError, ConfigError)
# these may pass, so only the deadline limits the attempts
PASSING = (TransferError, CapacityError)

log = logging.getLogger(__name__)


def as_error(failure: Exception, activity: str) -> DisaggError:
    """A DisaggError as it is; anything else is logged with its traceback and wrapped."""
    if isinstance(failure, DisaggError):
        return failure
    log.error("%s broke", activity, exc_info=failure)
    return DisaggError(f"{activity} broke: {type(failure).__name__}: {failure}")


def is_final(error: DisaggError, refusals: int, max_attempts: int) -> bool:
    """Whether a request fails with the error that it got at its latest refusal."""
    if isinstance(error, PERMANENT):
        return True
    return refusals >= max_attempts and not isinstance(error, PASSING)


def pause_s(refusals: int) -> float:
    """How long a request waits after so many refusals before it is tried again."""
    doublings = min(10, refusals - 1)
    return min(MAX_RETRY_S, RETRY_S * 2**doublings)


def blame(
    request: RequestState,
    worker: str,
    error: DisaggError,
    workers: Mapping[str, WorkerState],
    now: float,
) -> None:
    """Count a failure of the worker; of both workers if the hand-off between them broke.

    A request counts one failure of a worker at most, so that a bad request opens no breaker.
    """
    is_prefilling = worker == request.prefill and not request.is_decoding
    is_broken_handoff = is_prefilling and isinstance(error, TransferError)
    names = set(request.workers) if is_broken_handoff else {worker}
    names -= request.blamed_workers
    request.blamed_workers |= names
    for name in names:
        if name in workers:
            workers[name].add_failure(request.attempt_began, now)


def charge_death(
    requests: Iterable[RequestState], worker: str, max_attempts: int
) -> None:
    """Charge the death of a worker to the request that it computed, if that was the only one."""
    computed = [request for request in requests if request.computed_by == worker]
    if len(computed) == 1:
        (request,) = computed
        request.deaths += 1
        request.exclusive = request.deaths >= max_attempts - 1
