"""A request and its sequence: what is asked, what is known so far, where its KV is, where in life.

    tokens    │ prompt ............................ │ emitted ........ │
    KV        │ 0 ........................ n │        pending: tokens[n:] are still to be fed

A sequence whose prompt is in the pool feeds its pending tokens; when none is left, the last logits
give the next token. One pending token is ordinary decoding, more are a replay. Its life in one
engine, where every state can end in DONE:

               room for it            its last chunk        acknowledged, or aborted
    QUEUED ──────────────► PREFILL ───────────────► HELD ─────────────────────► DONE
      ▲ │                     │  prefilled here for another worker
      │ │ KV came from        │
      │ │ another worker      │ prefilled for itself
      │ ▼                     ▼
      │ └─────────────────► DECODE ──────────────────► DONE
      └──────────────────────┘    end of text, length, abort; or HELD: it goes on elsewhere
        preempted: its records are freed; it prefills and replays when there is room
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from disagg.errors import DisaggError, RequestError
from disagg.metrics import HandoffStats
from disagg.plan import Plan
from disagg.state import GroupState
from disagg.wire import Item

if TYPE_CHECKING:
    from disagg.model.cache import Workspace
    from disagg.model.describe import ModelInfo

MAX_NUMBER = 2**63
AGEING_S = 1.0  # of waiting makes up for half of the work


class Status(StrEnum):
    """Where a sequence is in its life; the drawing above has the arrows."""

    QUEUED = "queued"
    PREFILL = "prefill"
    HELD = "held"
    DECODE = "decode"
    DONE = "done"


ARROWS: Mapping[Status, tuple[Status, ...]] = {
    Status.QUEUED: (Status.PREFILL, Status.DECODE, Status.DONE),
    Status.PREFILL: (Status.HELD, Status.DECODE, Status.QUEUED, Status.DONE),
    Status.HELD: (Status.DONE,),
    Status.DECODE: (Status.QUEUED, Status.HELD, Status.DONE),
    Status.DONE: (),
}


@dataclass
class Life:
    """The state of one sequence, and how long it was in each: seconds of any monotonic clock."""

    since: float
    status: Status = Status.QUEUED
    spent: dict[Status, float] = field(default_factory=dict)

    def enter(self, status: Status, now: float) -> None:
        """Follow an arrow of the drawing at time `now`."""
        assert status in ARROWS[self.status], f"{self.status} does not become {status}"
        self.spent[self.status] = self.spent.get(self.status, 0.0) + now - self.since
        self.status, self.since = status, now

    def age(self, now: float) -> float:
        """Seconds since it began."""
        return sum(self.spent.values()) + now - self.since


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. RequestError for what makes no sense.

    max_tokens:  tokens to generate, at least 1
    temperature: 0: the most likely token
    top_p:       choose among the fewest tokens whose probabilities add up to this
    top_k:       choose among this many; 0: all
    seed:        with the index of a token, the only source of randomness
    ignore_eos:  go on behind the end of the text
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("top_k", 0), ("seed", 0)):
            number = getattr(self, name)
            fits = isinstance(number, int) and least <= number < MAX_NUMBER
            _require(fits, f"{name} is {number!r}; an integer from {least} to 2**63-1 is wanted")
        for name in ("temperature", "top_p"):
            number = getattr(self, name)
            _require(isinstance(number, int | float), f"{name} is {number!r}; a number is wanted")
        warm = 0 <= self.temperature < MAX_NUMBER
        _require(warm, f"temperature is {self.temperature}; 0 or more, below 2**63 is wanted")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; more than 0, at most 1 is wanted")


@dataclass(frozen=True)
class Request:
    """What an engine is asked: token ids of a prompt, how to go on, and the codec of its KV.

    rid: the name of this attempt, unique in an engine while it lives
    """

    rid: str
    tokens: tuple[int, ...]
    params: SamplingParams
    codec: str

    def __post_init__(self) -> None:
        _require(bool(self.tokens), "the prompt is empty; at least one token is wanted")


class Handoff(Protocol):
    """Where the records of a prompt go while it prefills. Called by the engine; must not block.

    What these raise ends the request, and no other.
    """

    def begin(self, plan: Plan, groups: Seq[GroupState]) -> None:
        """The records are allocated; the first chunk is about to be computed."""

    def offer(self, items: Seq[Item]) -> None:
        """The bytes of these items are final; they stay until a Release or Abort."""


@dataclass(eq=False)
class Sequence:
    """One request in an engine. The engine's thread alone changes it.

    n:         tokens in the pool · groups: their records, one state per layer group; empty: none
    emitted:   tokens generated so far, here or elsewhere
    order:     who came first keeps its place
    hold_at:   tokens in the pool at which it stops, to go on elsewhere; None: it does not
    workspace: exact KV of the prompt, while it prefills · encode_s: time spent compressing it
    error:     why it has to end with the step that is running
    """

    request: Request
    plan: Plan
    life: Life
    order: int
    handoff: Handoff | None = None
    emitted: list[int] = field(default_factory=list)
    n: int = 0
    groups: tuple[GroupState, ...] = ()
    hold_at: int | None = None
    workspace: "Workspace | None" = None
    encode_s: float = 0.0
    error: DisaggError | None = None

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def prompt_len(self) -> int:
        return len(self.request.tokens)

    @property
    def length(self) -> int:
        """Tokens known: prompt and answer."""
        return self.prompt_len + len(self.emitted)

    def pending(self, limit: int) -> list[int]:
        """The next tokens to feed, at most `limit`."""
        if self.n < self.prompt_len:
            return list(self.request.tokens[self.n : self.n + limit])
        first = self.n - self.prompt_len
        return self.emitted[first : first + limit]

    def finish_reason(self, info: "ModelInfo") -> str | None:
        """Why the answer of a model ends with its last token; None: it goes on."""
        params = self.request.params
        if self.emitted and self.emitted[-1] in info.eos_ids and not params.ignore_eos:
            return "stop"
        full = self.length >= info.context_length
        return "length" if full or len(self.emitted) >= params.max_tokens else None


def handoff_stats(plan: Plan, tokens: int, encode_ms: float = 0.0) -> HandoffStats:
    """What the KV of the first `tokens` tokens takes, before anything of it was sent."""
    numbers = tokens * sum(2 * len(g.layers) * g.heads * g.head_dim for g in plan.groups)
    return HandoffStats(
        codec=plan.spec,
        tokens=tokens,
        fp16_bytes=2 * numbers,
        fp8_bytes=numbers,
        resident_bytes=plan.nbytes(tokens),
        encode_ms=encode_ms,
    )


def urgency(left: int, waited_s: float, ageing_s: float = AGEING_S) -> float:
    """Whose turn it is: the least of these.

    left: tokens to compute, counted half for every `ageing_s` seconds of waiting. So prompts of l
    tokens pass one of L only if they come within ageing_s * log2(L / l) seconds after it.
    """
    return left * 2.0 ** (-waited_s / ageing_s)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)
