"""A request and its sequence: its parameters, its tokens so far, its KV records, its status.

    tokens    │ prompt ............................ │ emitted ........ │
    KV        │ 0 ........................ n │        pending: tokens[n:] are still to be fed

A sequence whose prompt is in the pool feeds its pending tokens; behind the last of them, the logits
give the next token. One pending token is ordinary decoding, several are a replay. These are the
states of a sequence in one engine; every state can end in DONE:

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
from collections.abc import Mapping
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
    from disagg.model.cache import Workspace
    from disagg.model.describe import ModelInfo

MAX_NUMBER = 2**63
AGEING_S = 1.0  # waiting this long makes up for half of the work


@dataclass(frozen=True)
class Bounds:
    """The range of a sampling parameter; the server's schema reads the same bounds.

    ge, gt, le, lt: limits of a number, as pydantic calls them; None: not limited on this side
    words:          the range in words, for errors
    """

    words: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def hold(self, number: float) -> bool:
        """Whether a number is in the range; no NaN is."""
        return (
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )


PENALTY = Bounds("a number between -1e4 and 1e4", gt=-1e4, lt=1e4)
AS_MANY_AS_FIT = -1  # max_tokens of an answer that only the context limits
LEAST_INTEGERS = {
    "min_tokens": 0,
    "top_k": 0,
    "seed": 0,
}
BOUNDS = {
    "temperature": Bounds("a number from 0, below 2**63", ge=0, lt=2.0**63),
    "top_p": Bounds("a number above 0, at most 1", gt=0, le=1),
    "min_p": Bounds("a number from 0 to 1", ge=0, le=1),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": Bounds("a number between 0 and 1e4", gt=0, lt=1e4),
}

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
    """How tokens are chosen, and when to stop. RequestError for values that make no sense.

    max_tokens:  tokens to generate, at least 1; -1: as many as fit into the context
    min_tokens:  tokens to generate before the end of the text or a stop token may come
    temperature: 0: the most likely token
    top_p:       choose among the fewest tokens whose probabilities add up to this
    top_k:       choose among this many tokens; 0: all
    min_p:       choose among tokens at least this times as probable as the most likely one
    seed:        with the index of a token, the only source of randomness; None: `LLM` draws one for
                 each answer, and an engine takes 0
    presence_penalty:   subtracted from the logit of each token of the answer, once
    frequency_penalty:  the same, once for each time that the token was generated
    repetition_penalty: divides the logits of tokens of prompt and answer; multiplies negative ones
    logit_bias:  (token, value added to its logit)
    stop_token_ids: tokens that end the answer, as the end of the text does
    ignore_eos:  go on behind the end of the text
    logprobs:    report the log-probability of each token and of this many of the likeliest tokens
                 in its place; None: report none
    prompt_logprobs: report them for the prompt too, from its second token on
    grammar:     what the answer must follow, from a builder of `disagg.grammar`; empty: anything.
                 It ends where nothing may follow, whatever `min_tokens` is
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Seq[tuple[int, float]] = ()
    stop_token_ids: Seq[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: str = ""

    def __post_init__(self) -> None:
        self._check_integers()
        self._check_numbers()
        self._check_max_tokens()
        self._check_logprobs()
        self._check_named_tokens()
        _require(
            self.logprobs is not None or not self.prompt_logprobs,
            "prompt_logprobs without logprobs; say how many of the likeliest",
        )
        _require(
            isinstance(self.grammar, str),
            f"grammar is {reprlib.repr(self.grammar)}; expected a text, such as that of "
            "disagg.grammar.json_schema(...)",
        )

    def _check_integers(self) -> None:
        for name, least in LEAST_INTEGERS.items():
            number = getattr(self, name)
            if name == "seed" and number is None:
                continue
            _require(
                isinstance(number, int) and least <= number < MAX_NUMBER,
                f"{name} is {number!r}; expected an integer from {least} to 2**63-1",
            )

    def _check_max_tokens(self) -> None:
        limit = self.max_tokens
        if limit == AS_MANY_AS_FIT:
            return
        _require(
            isinstance(limit, int) and 1 <= limit < MAX_NUMBER,
            f"max_tokens is {limit!r}; expected an integer from 1 to 2**63-1, "
            "or -1 for as many as fit",
        )
        _require(
            self.min_tokens <= limit,
            f"min_tokens is {self.min_tokens}; at most max_tokens, {limit}",
        )

    def _check_numbers(self) -> None:
        for name, bounds in BOUNDS.items():
            number = getattr(self, name)
            _require(
                isinstance(number, int | float) and bounds.hold(number),
                f"{name} is {number!r}; expected {bounds.words}",
            )

    def _check_logprobs(self) -> None:
        if self.logprobs is None:
            return
        _require(
            type(self.logprobs) is int and self.logprobs >= 0,
            f"logprobs is {self.logprobs!r}; expected an integer from 0, or None",
        )

    def _check_named_tokens(self) -> None:
        try:
            ids_fit = all(index(token) >= 0 for token in self.named_tokens)
            biases_fit = all(isinstance(x, int | float) for _, x in self.logit_bias)
            fits = ids_fit and biases_fit
        except (TypeError, ValueError):
            fits = False
        ids = reprlib.repr(self.stop_token_ids)
        biases = reprlib.repr(self.logit_bias)
        _require(
            fits,
            f"stop_token_ids are {ids}, logit_bias is {biases}; "
            "expected token ids, and pairs of a token id and a number",
        )

    @property
    def named_tokens(self) -> list[int]:
        """The tokens of `stop_token_ids` and `logit_bias`."""
        return [*self.stop_token_ids, *(token for token, _ in self.logit_bias)]

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the logits."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn."""
        return bool(self.top_k or self.min_p) or self.top_p < 1

    def ends(self, eos_ids: Seq[int]) -> tuple[int, ...]:
        """The tokens that end an answer; eos_ids: those of the model."""
        if self.ignore_eos:
            return tuple(self.stop_token_ids)
        return (*self.stop_token_ids, *eos_ids)


@dataclass(frozen=True)
class Request:
    """The token ids of a prompt, how to sample its answer, and the codec of its KV.

    rid:        the name of this attempt, unique in an engine while it lives
    prediction: tokens that its answer may repeat; they change how many steps it takes
    """

    rid: str
    tokens: tuple[int, ...]
    params: SamplingParams
    codec: str
    prediction: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(bool(self.tokens), "the prompt is empty; expected at least one token")


class Handoff(Protocol):
    """Where the records of a prompt go while it prefills. Called by the engine; must not block.

    An error that these raise ends the request, and no other.
    """

    def begin(self, plan: Plan, groups: Seq[GroupState]) -> None:
        """The records are allocated; the first chunk is about to be computed."""

    def offer(self, items: Seq[Item]) -> None:
        """The bytes of these items are final; they stay until an Abort."""

    def has(self, item: Item) -> bool:
        """Whether the receiver has an item already: the engine neither encodes nor offers it."""


@dataclass(eq=False)
class Sequence:
    """One request in an engine. Only the engine's thread changes it.

    born:      when the request arrived, on the engine's clock
    order:     number of its arrival; a preempted sequence keeps it
    emitted:   tokens generated so far, here or on another worker
    n:         tokens in the pool
    is_long:   its keys have the rotation of long texts: see `Plan.rope_switch`
    cached:    leading tokens of the prompt that were cached at its last start
    first_cached: the same at its first start, before it could find its own; None: not started
    prefix_pages: raw pages of these tokens at that start, by layer group of the prefix cache
    keys:      of the units of its exact KV, by layer group
    stored_units: leading units of them that are in the prefix cache
    borders:   tokens behind which its states are copied for later prompts, with keys of the copies
    groups:    its records, one state per layer group; empty: none
    slot_promised: it came with a decode slot of its own
    has_slot:  this engine gave it a decode slot
    retry_below_bytes: bytes that others used when it was preempted; while any sequence computes,
               it waits until they use fewer
    hold_at:   tokens in the pool at which it stops, to move to another worker; None: it stays
    workspace: exact KV of the prompt, while it prefills
    encode_s:  time spent compressing it
    error:     why it ends with the running step
    sample:    its number among the samples of `error_probe.py`; None: it is none
    errors:    what the probe measured: by codec and layer group, an error for each sampled layer
    scores:    log-probabilities not yet reported: of the prompt from its second token on, then of
               the last token
    """

    request: Request
    plan: Plan
    born: float
    order: int
    status: Status = Status.QUEUED
    handoff: Handoff | None = None
    emitted: list[int] = field(default_factory=list)
    n: int = 0
    is_long: bool = False
    cached: int = 0
    first_cached: int | None = None
    keys: Seq[Seq[bytes]] = ()
    prefix_pages: Seq[Seq[int]] = ()
    stored_units: int = 0
    borders: Mapping[int, bytes] = field(default_factory=dict)
    groups: tuple[GroupState, ...] = ()
    slot_promised: bool = False
    has_slot: bool = False
    retry_below_bytes: float = inf
    hold_at: int | None = None
    workspace: "Workspace | None" = None
    encode_s: float = 0.0
    error: DisaggError | None = None
    sample: int | None = None
    errors: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    scores: list[Logprobs] = field(default_factory=list)

    def enter(self, status: Status) -> None:
        """Follow an arrow of the drawing."""
        assert status in ARROWS[self.status], f"{self.status} does not become {status}"
        self.status = status

    def begin(self, cached: int) -> None:
        """Compute from the token behind the cached ones on."""
        self.n = cached
        self.cached = cached
        if self.first_cached is None:
            self.first_cached = cached

    @property
    def rid(self) -> str:
        return self.request.rid

    @cached_property
    def prompt_len(self) -> int:
        return len(self.request.tokens)

    @property
    def state_pages(self) -> list[int]:
        """The records of its layers with a state."""
        states = self.groups[len(self.plan.paged) :]
        return [state.side for state in states if state.side is not None]

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.prompt_len + len(self.emitted)

    @property
    def outgrows_rotation(self) -> bool:
        """Whether its keys have the rotation of short texts, and it has become a long one."""
        return not self.is_long and self.plan.is_long(self.length)

    def choose_rotation(self, shared: bool) -> None:
        """Choose the rotation of its keys by the length of the text.

        shared: another worker computes them, or gets them. Both go by the text before its last new
                token, which only one of them may know
        """
        num_new = 1 if shared and self.emitted else 0
        self.is_long = self.plan.is_long(self.length - num_new)

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of its prompt are still to be reported."""
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
        if self.length >= info.context_length:
            return "length"
        if params.max_tokens == AS_MANY_AS_FIT:
            return None
        return "length" if len(self.emitted) >= params.max_tokens else None


def handoff_stats(
    plan: Plan, tokens: int, cached_tokens: int, encode_ms: float = 0.0
) -> HandoffStats:
    """The bytes of the KV of the first `tokens` tokens, before any of it is sent."""
    numbers = plan.numbers(tokens)
    return HandoffStats(
        codec=plan.spec,
        tokens=tokens,
        cached_tokens=cached_tokens,
        fp16_bytes=2 * numbers,
        fp8_bytes=numbers,
        resident_bytes=plan.resident_bytes(tokens),
        state_bytes=plan.state_bytes,
        wire_state_bytes=plan.wire_state_bytes,
        encode_ms=encode_ms,
    )


def urgency(tokens_left: int, waited_s: float) -> float:
    """The key by which waiting sequences are sorted: the least comes first.

    tokens_left: tokens to compute, counted half for every `AGEING_S` seconds of waiting. So prompts
    of l tokens pass one of L only if they come within AGEING_S * log2(L / l) seconds after it.
    """
    return tokens_left * 2.0 ** (-waited_s / AGEING_S)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)
