"""A request and its sequence: what is asked, what is known so far, where its KV is.

    tokens    │ prompt ............................ │ emitted ........ │
    KV        │ 0 ........................ n │        pending: tokens[n:] are still to be fed

A sequence whose prompt is in the pool feeds its pending tokens; when none is left, the last logits
give the next token. One pending token is ordinary decoding, more are a replay.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from disagg.errors import RequestError
from disagg.metrics import Life
from disagg.plan import Plan
from disagg.state import GroupState
from disagg.wire import Item

if TYPE_CHECKING:
    from disagg.model.cache import Workspace

MAX_SEED = 2**63


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

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
        _require(self.max_tokens >= 1, f"max_tokens is {self.max_tokens}; at least 1 is wanted")
        warm = 0 <= self.temperature < float("inf")
        _require(warm, f"temperature is {self.temperature}; 0 or more is wanted")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; more than 0, at most 1 is wanted")
        _require(self.top_k >= 0, f"top_k is {self.top_k}; 0 (all) or more is wanted")
        _require(0 <= self.seed < MAX_SEED, f"seed is {self.seed}; 0 to 2**63-1 is wanted")


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


@dataclass(frozen=True)
class KVUsage:
    """What the KV of `tokens` tokens takes here, and what it would take elsewhere.

    fp16_bytes, fp8_bytes: uncompressed, at 2 and 1 bytes a number
    resident_bytes:        pages, segments, side records and tail, as stored
    encode_ms:             time spent compressing the prompt
    """

    tokens: int
    fp16_bytes: int
    fp8_bytes: int
    resident_bytes: int
    encode_ms: float


class Handoff(Protocol):
    """Where the records of a prompt go while it prefills. Called by the engine; must not block."""

    def begin(self, plan: Plan, groups: Seq[GroupState]) -> None:
        """The records are allocated; the first chunk is about to be computed."""

    def offer(self, items: Seq[Item]) -> None:
        """The bytes of these items are final; they stay until a Release or Abort."""


@dataclass(eq=False)
class Sequence:
    """One request in an engine. The engine's thread alone changes it.

    n:        tokens in the pool · groups: their records, one state per layer group; empty: none
    emitted:  tokens generated so far, here or elsewhere
    order:    who came first keeps its place
    workspace: exact KV of the prompt, while it prefills · encode_s: time spent compressing it
    """

    request: Request
    plan: Plan
    life: Life
    order: int
    handoff: Handoff | None = None
    emitted: list[int] = field(default_factory=list)
    n: int = 0
    groups: tuple[GroupState, ...] = ()
    workspace: "Workspace | None" = None
    encode_s: float = 0.0

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

    def usage(self, tokens: int) -> KVUsage:
        """What the KV of the first `tokens` tokens takes."""
        numbers = tokens * sum(2 * len(g.layers) * g.heads * g.head_dim for g in self.plan.groups)
        resident = self.plan.nbytes(tokens)
        return KVUsage(tokens, 2 * numbers, numbers, resident, 1e3 * self.encode_s)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)
