"""Which sequences go on at another decode worker, and how much room they reserve there."""

from collections.abc import Mapping
from dataclasses import replace

from disagg.router.actions import Reserve
from disagg.router.request_state import Phase, RequestState
from disagg.router.worker_state import WorkerState

# tokens that a sequence decodes on while its pages are copied to another worker
MOVE_TOKENS = 24
# pause of a sequence before it asks another worker for room
MOVE_RETRY_S = 1.0


def has_to_move(
    request: RequestState, workers: Mapping[str, WorkerState], now: float
) -> bool:
    """Whether its worker stopped decoding, and the sequence has more than a few tokens left.

    A sequence with log-probabilities stays: both workers would have to report equal ones.
    """
    if request.phase is not Phase.DECODE or request.decode is None:
        return False
    if request.target or now < request.not_before:
        return False
    if workers[request.decode].info.role.decodes:
        return False
    sampling = request.job.sampling
    tokens_left = sampling.get("max_tokens", 0) - len(request.emitted)
    return tokens_left > MOVE_TOKENS and sampling.get("logprobs") is None


def reserve_target(request: RequestState, target: str, senders: int) -> Reserve:
    """Ask for room for the sequence as it will be when its pages have arrived.

    senders: ranks of the worker that it leaves
    """
    request.job = replace(request.job, senders=senders)
    return _reserve(request, target, MOVE_TOKENS)


def reserve_more(request: RequestState, target: str) -> Reserve:
    """Ask again, with twice as many spare tokens: the sequence outgrows its reservation."""
    return _reserve(request, target, 2 * request.spare_tokens)


def _reserve(request: RequestState, target: str, spare_tokens: int) -> Reserve:
    tokens = len(request.job.prompt) + len(request.emitted) + spare_tokens
    request.target = target
    request.job = replace(request.job, emitted=request.emitted[:], moved=tokens)
    return Reserve(target, request.job)


def is_outgrowing(request: RequestState) -> bool:
    """Whether it has used more than half of its spare tokens before the move began."""
    emitted_since = len(request.emitted) - len(request.job.emitted)
    return 2 * emitted_since > request.spare_tokens
