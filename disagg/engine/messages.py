"""The messages that go into an engine and come out of it, one class each; and their errors."""

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from disagg.engine.sequence import Handoff, Logprobs, Request
from disagg.errors import CapacityError, DisaggError
from disagg.grammar.state import GrammarState
from disagg.kv.state import GroupState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prefill:
    """Compute a prompt, and go on behind the tokens emitted so far.

    handoff:  where its records are offered; they are held from the first token on, until Abort
    waited_s: how long the request has waited already
    """

    request: Request
    handoff: Handoff | None = None
    emitted: tuple[int, ...] = ()
    waited_s: float = 0.0

    @property
    def rid(self) -> str:
        return self.request.rid


@dataclass(frozen=True)
class Admit:
    """Decode a prompt whose KV is in this pool already; the records become the engine's.

    emitted:  tokens so far, the first one from prefill; the others are fed before new ones come
    moved:    tokens in the records of a sequence that decoded elsewhere; 0: those of the prompt
    logprobs: of the last token, where the request asks for them
    """

    request: Request
    groups: tuple[GroupState, ...]
    emitted: tuple[int, ...]
    moved: int = 0
    logprobs: tuple[Logprobs, ...] = ()

    @property
    def rid(self) -> str:
        return self.request.rid


@dataclass(frozen=True)
class Move:
    """Decode until the records hold `tokens` tokens; then hold the records, until Abort.

    `handoff.begin` is called twice: now, when sealed pages are final, and when all records are.
    """

    rid: str
    tokens: int
    handoff: Handoff


@dataclass(frozen=True)
class Abort:
    """End a request in any state and free its records; an unknown one is no error."""

    rid: str


@dataclass(frozen=True)
class Drain:
    """Take no new requests; `Engine.run` returns when the last one has ended."""


@dataclass(frozen=True)
class Compiled:
    """From the engine itself: the grammar of a request is compiled, or failed to.

    start: holds what was compiled until the request has begun
    """

    rid: str
    start: Future[GrammarState]


RequestMessage = Prefill | Admit | Move | Abort
Message = RequestMessage | Drain | Compiled


@dataclass(frozen=True)
class Token:
    """Token `index` of an answer; the last one says why it ended.

    A sequence that starts with emitted tokens repeats the last of them, and an answer that ends
    because the pool has no room repeats its last token.
    cached_tokens: leading tokens of the prompt that were not computed here
    logprobs:      of the token, where the request asks for them; before them those of the prompt
    """

    rid: str
    index: int
    token: int
    finish_reason: str | None = None
    cached_tokens: int = 0
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True)
class Prefilled:
    """A prompt is computed; its records are final and held.

    finish_reason: why the answer ends with this token; None: it goes on where the records go
    encode_ms:     time spent compressing the prompt
    cached_tokens: leading tokens that were not computed
    logprobs:      of the first token, where the request asks for them
    errors:        of attention outputs, by codec, layer group and layer, if `error_probe.py`
                   sampled it
    """

    rid: str
    first_token: int
    finish_reason: str | None
    encode_ms: float
    cached_tokens: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    errors: Mapping[str, list[dict[str, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """A sequence stopped decoding: its records are final and held. emitted: its answer so far."""

    rid: str
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class Failed:
    """A request that ended with an error; all its records are freed."""

    rid: str
    error: DisaggError


@dataclass(frozen=True)
class EngineLoad:
    """Sequences by state, and what the engine could take now.

    waiting:    sequences that wait for room or for their turn
    free_bytes: of the pool, minus those reserved for growing sequences
    slots:      how many more sequences may compute
    """

    running: int = 0
    waiting: int = 0
    held: int = 0
    free_bytes: int = 0
    slots: int = 0


@dataclass
class StepOutput:
    """The results of one step; the engine holds no reference to it."""

    tokens: list[Token] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


# texts of torch: the host has no memory left; the driver found none for itself
FULL = "can't allocate memory", "CUDA error: out of memory"


def as_disagg_error(error: BaseException) -> DisaggError:
    """An error as a DisaggError, without its traceback: frames would keep tensors alive."""
    if isinstance(error, DisaggError):
        return error.with_traceback(None)
    log.error("a request broke", exc_info=error)
    kind = CapacityError if is_memory_error(error) else DisaggError
    return kind(f"{type(error).__name__}: {error}")


def is_memory_error(error: BaseException) -> bool:
    """Whether there was not enough memory, on a host or a device."""
    full = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return full or any(words in str(error) for words in FULL)
