"""What a decode worker promises and accepts, and which requests are outside of that."""

from dataclasses import dataclass

from disagg.errors import LayoutError, PromptTooLongError, RequestError
from disagg.plan import Plan
from disagg.transfer.messages import Request

MAX_RID_CHARS = 256


@dataclass(frozen=True)
class Terms:
    """What a decode worker promises and accepts.

    model:          fingerprint of config and weights
    plan:           the plan whose records it allocates
    epoch:          its incarnation; a fence raises it
    capacity_bytes: of the whole pool; longer prompts are refused at once
    lease_s:        a reservation ends this long after the last sign of life
    memory_s:       how long ended hand-offs and aborts are remembered; more than any deadline
    max_waiting:    requests that may wait for room
    """

    model: str
    plan: Plan
    epoch: int
    capacity_bytes: int
    lease_s: float = 10.0
    memory_s: float = 900.0
    max_waiting: int = 1024

    def check(self, request: Request) -> None:
        """LayoutError for another model or plan, RequestError for what can never be served."""
        check_rid(request.rid)
        for what, ours, theirs in (
            ("model", self.model, request.model),
            ("plan", self.plan.fingerprint, request.plan),
        ):
            if ours != theirs:
                raise LayoutError(f"{what} {theirs} is not the one served here, {ours}")
        if request.tokens < 1 or self.plan.nbytes(request.tokens) > self.capacity_bytes:
            raise PromptTooLongError(
                f"a prompt of {request.tokens} tokens for a pool of {self.capacity_bytes} bytes"
            )


def check_rid(rid: str) -> None:
    """RequestError for a request id that is empty or longer than MAX_RID_CHARS."""
    if not 0 < len(rid) <= MAX_RID_CHARS:
        raise RequestError(f"a request id has 1 to {MAX_RID_CHARS} characters, not {len(rid)}")
