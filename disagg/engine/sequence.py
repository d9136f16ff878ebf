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

import reprlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import inf
from operator import index
from typing import TYPE_CHECKING, Protocol

from disagg.errors import DisaggError, RequestError
from disagg.kv.page import Item
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState
from disagg.transfer.stats import HandoffStats

if TYPE_CHECKING:
    from torch import Tensor

    from disagg.model.cache import Workspace
    from disagg.model.describe import ModelInfo

MAX_NUMBER = 2**63
MAX_PENALTY = 1e4
AGEING_S = 1.0  # of waiting makes up for half of the work

# of one token: its log-probability, and the likeliest tokens in its place with theirs
Logprobs = tuple[float, tuple[tuple[int, float], ...]]


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


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. RequestError for what makes no sense.

    max_tokens:  tokens to generate, at least 1
    min_tokens:  as many come before the end of the text or a stop token may
    temperature: 0: the most likely token
    top_p:       choose among the fewest tokens whose probabilities add up to this
    top_k:       choose among this many; 0: all
    min_p:       choose among those at least this times as probable as the most likely one
    seed:        with the index of a token, the only source of randomness
    presence_penalty, frequency_penalty: off the logit of a token that was said, once or each time
    repetition_penalty: divides the logits of tokens of prompt and answer; multiplies negative ones
    logit_bias:  (token, what is added to its logit)
    stop_token_ids: end the answer, as the end of the text does
    ignore_eos:  go on behind the end of the text
    logprobs:    say those of each token, and of so many of the likeliest; None: do not
    prompt_logprobs: say them of the prompt too, from its second token on
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Seq[tuple[int, float]] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        for name, least in INTEGERS.items():
            number = getattr(self, name)
            fits = isinstance(number, int) and least <= number < MAX_NUMBER
            _require(
                fits,
                f"{name} is {number!r}; an integer from {least} to 2**63-1 is wanted",
            )
        for name, (may_be, wanted) in NUMBERS.items():
            number = getattr(self, name)
            fits = isinstance(number, int | float) and may_be(number)
            _require(fits, f"{name} is {number!r}; {wanted} is wanted")
        fits = self.min_tokens <= self.max_tokens
        _require(
            fits,
            f"min_tokens is {self.min_tokens}; at most max_tokens, {self.max_tokens}",
        )
        fits = self.logprobs is None or (
            type(self.logprobs) is int and self.logprobs >= 0
        )
        _require(
            fits,
            f"logprobs is {self.logprobs!r}; an integer from 0, or None, is wanted",
        )
        try:
            fits = all(index(token) >= 0 for token in self.named_tokens)
            fits &= all(isinstance(bias, int | float) for _, bias in self.logit_bias)
        except (TypeError, ValueError):
            fits = False
        ids, biases = reprlib.repr(self.stop_token_ids), reprlib.repr(self.logit_bias)
        wanted = "token ids, and pairs of one and a number, are wanted"
        _require(fits, f"stop_token_ids are {ids}, logit_bias is {biases}; {wanted}")
        scored = self.logprobs is not None or not self.prompt_logprobs
        _require(
            scored, "prompt_logprobs without logprobs; say how many of the likeliest"
        )

    @property
    def named_tokens(self) -> list[int]:
        """The tokens that it names."""
        return [*self.stop_token_ids, *(token for token, _ in self.logit_bias)]

    @property
    def penalises(self) -> bool:
        """Whether tokens that were seen have other logits than the model's."""
        repeats = self.repetition_penalty != 1
        return repeats or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def truncates(self) -> bool:
        """Whether some tokens are out of the question."""
        return bool(self.top_k or self.min_p) or self.top_p < 1

    def ends(self, eos_ids: Seq[int]) -> tuple[int, ...]:
        """The tokens that end an answer of a model."""
        return (*self.stop_token_ids, *(() if self.ignore_eos else eos_ids))


INTEGERS = {"max_tokens": 1, "min_tokens": 0, "top_k": 0, "seed": 0}  # with their least
NUMBERS: dict[
    str, tuple[Callable[[float], bool], str]
] = {  # what they may be, and in words
    "temperature": (lambda x: 0 <= x < MAX_NUMBER, "a number from 0, below 2**63,"),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0, at most 1,"),
    "min_p": (lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "presence_penalty": (
        lambda x: abs(x) < MAX_PENALTY,
        "a number between -1e4 and 1e4",
    ),
    "frequency_penalty": (
        lambda x: abs(x) < MAX_PENALTY,
        "a number between -1e4 and 1e4",
    ),
    "repetition_penalty": (lambda x: 0 < x < MAX_PENALTY, "a number between 0 and 1e4"),
}


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
        """The bytes of these items are final; they stay until an Abort."""

    def has(self, item: Item) -> bool:
        """Whether an item is there already: it is neither encoded nor offered, unless it was."""


@dataclass(eq=False)
class Sequence:
    """One request in an engine. The engine's thread alone changes it.

    n:         tokens in the pool · groups: their records, one state per layer group; empty: none
    emitted:   tokens generated so far, here or elsewhere
    cached:    leading tokens of the prompt that were known when it started, or started again
    known:     what that was at first: later some of it is its own; None: it has not started
    keys:      of the units of its exact KV, by layer group · kept_units: those that were kept
    born:      when it was asked, on the clock of the engine · order: who came first keeps its place
    promised:  it came with a row of decode steps for life · seated: it was given one here
    crowd:     bytes that others had when it was preempted: where they compute, it waits for fewer
    hold_at:   tokens in the pool at which it stops, to go on elsewhere; None: it does not
    workspace: exact KV of the prompt, while it prefills · encode_s: time spent compressing it
    error:     why it has to end with the step that is running
    sample:    which one of `error_probe.py` it is; None: none · errors: what was measured, by codec
    scores:    log-probabilities that nobody has heard: of the prompt from its second token on,
               then of the last token
    """

    request: Request
    plan: Plan
    born: float
    order: int
    status: Status = Status.QUEUED
    handoff: Handoff | None = None
    emitted: list[int] = field(default_factory=list)
    n: int = 0
    cached: int = 0
    known: int | None = None
    keys: Seq[Seq[bytes]] = ()
    kept_units: int = 0
    groups: tuple[GroupState, ...] = ()
    promised: bool = False
    seated: bool = False
    crowd: float = inf
    hold_at: int | None = None
    workspace: "Workspace | None" = None
    encode_s: float = 0.0
    error: DisaggError | None = None
    sample: int | None = None
    errors: dict[str, "Tensor"] = field(default_factory=dict)
    scores: list[Logprobs] = field(default_factory=list)

    def enter(self, status: Status) -> None:
        """Follow an arrow of the drawing."""
        assert status in ARROWS[self.status], f"{self.status} does not become {status}"
        self.status = status

    def begin(self, cached: int) -> None:
        """Compute from here on: so many tokens are known."""
        self.n = self.cached = cached
        self.known = cached if self.known is None else self.known

    @property
    def rid(self) -> str:
        return self.request.rid

    @cached_property
    def prompt_len(self) -> int:
        return len(self.request.tokens)

    @property
    def length(self) -> int:
        """Tokens known: prompt and answer."""
        return self.prompt_len + len(self.emitted)

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of its prompt are wanted, and were not said."""
        return self.request.params.prompt_logprobs and not self.emitted

    def pending(self, limit: int) -> list[int]:
        """The next tokens to feed, at most `limit`."""
        if self.n < self.prompt_len:
            return list(self.request.tokens[self.n : self.n + limit])
        first = self.n - self.prompt_len
        return self.emitted[first : first + limit]

    def finish_reason(self, info: "ModelInfo") -> str | None:
        """Why the answer of a model ends with its last token; None: it goes on."""
        params = self.request.params
        if self.emitted and self.emitted[-1] in params.ends(info.eos_ids):
            return "stop"
        full = self.length >= info.context_length
        return "length" if full or len(self.emitted) >= params.max_tokens else None


def handoff_stats(
    plan: Plan, tokens: int, cached_tokens: int, encode_ms: float = 0.0
) -> HandoffStats:
    """What the KV of the first `tokens` tokens takes, before anything of it was sent."""
    numbers = plan.numbers(tokens)
    return HandoffStats(
        codec=plan.spec,
        tokens=tokens,
        cached_tokens=cached_tokens,
        fp16_bytes=2 * numbers,
        fp8_bytes=numbers,
        resident_bytes=plan.nbytes(tokens),
        encode_ms=encode_ms,
    )


def urgency(left: int, waited_s: float) -> float:
    """Whose turn it is: the least of these.

    left: tokens to compute, counted half for every `AGEING_S` seconds of waiting. So prompts of l
    tokens pass one of L only if they come within AGEING_S * log2(L / l) seconds after it.
    """
    return left * 2.0 ** (-waited_s / AGEING_S)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)
