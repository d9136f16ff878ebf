"""What a decode worker promises and accepts, and which requests are outside of that."""

from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import LayoutError, PromptTooLongError, RequestError, ReservationError
from disagg.plan import Plan
from disagg.transfer.messages import Request
from disagg.transfer.units import units_of

MAX_RID_CHARS = 256
MAX_SPEC_CHARS = 4096


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
    plan_of:        plans of requests that name a spec of their own; None: there is one plan
    """

    model: str
    plan: Plan
    epoch: int
    capacity_bytes: int
    lease_s: float = 10.0
    memory_s: float = 900.0
    max_waiting: int = 1024
    plan_of: Callable[[str], Plan] | None = None

    def plan_for(self, request: Request) -> Plan:
        """The plan of a request: of its own spec, if it has one; ConfigError if nobody knows it."""
        if request.spec and self.plan_of is not None:
            return self.plan_of(request.spec)
        return self.plan

    def check(self, request: Request, epoch: int) -> None:
        """LayoutError for another model or plan, RequestError for what can never be served,
        ReservationError for another epoch than the one of now.
        """
        check_rid(request.rid)
        if len(request.spec) > MAX_SPEC_CHARS:
            raise RequestError(f"a spec has at most {MAX_SPEC_CHARS} characters")
        plan = self.plan_for(request)
        for what, ours, theirs in (
            ("model", self.model, request.model),
            ("plan", plan.fingerprint, request.plan),
        ):
            if ours != theirs:
                raise LayoutError(f"{what} {theirs} is not the one served here, {ours}")
        if request.tokens < 1 or plan.nbytes(request.tokens) > self.capacity_bytes:
            raise PromptTooLongError(
                f"a prompt of {request.tokens} tokens for a pool of {self.capacity_bytes} bytes"
            )
        if request.keys and len(request.keys) != sum(map(len, units_of(plan, request.tokens))):
            raise RequestError(f"{len(request.keys)} keys do not fit {request.tokens} tokens")
        if request.epoch != epoch:
            raise ReservationError(f"epoch {request.epoch} is not {epoch}, the one of now")


def check_rid(rid: str) -> None:
    """RequestError for a request id that is empty or longer than MAX_RID_CHARS."""
    if not 0 < len(rid) <= MAX_RID_CHARS:
        raise RequestError(f"a request id has 1 to {MAX_RID_CHARS} characters, not {len(rid)}")
