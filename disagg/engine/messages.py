"""What goes into an engine and what comes out, one object per fact; and errors, as told."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from disagg.engine.sequence import Handoff, Logprobs, Request
from disagg.errors import CapacityError, DisaggError
from disagg.kv.state import GroupState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prefill:
    """Compute a prompt and go on, behind the tokens that were emitted so far.

    handoff:  where its records are offered: they are held from the first token on, until Abort
    waited_s: that the request is old already
    """

    request: Request
    handoff: Handoff | None = None
    emitted: tuple[int, ...] = ()
    waited_s: float = 0.0


@dataclass(frozen=True)
class Admit:
    """Decode a prompt whose KV is in this pool already; the records become the engine's.

    emitted:  tokens known so far, the first one from prefill; more are fed before new ones come
    moved:    tokens in the records of a sequence that decoded elsewhere; 0: those of the prompt
    logprobs: of the last one, where they are wanted
    """

    request: Request
    groups: tuple[GroupState, ...]
    emitted: tuple[int, ...]
    moved: int = 0
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True)
class Move:
    """Decode on until the records hold so many tokens; then hold them, until Abort.

    `handoff.begin` is called now and then again: what is sealed is final, then everything.
    """

    rid: str
    tokens: int
    handoff: Handoff


@dataclass(frozen=True)
class Abort:
    """Forget a request in whatever state, taken over by another or not; unknown are no error."""

    rid: str


@dataclass(frozen=True)
class Drain:
    """Finish what is here; `Engine.run` returns when nothing is left."""


Message = Prefill | Admit | Move | Abort | Drain


@dataclass(frozen=True)
class Token:
    """Token `index` of an answer; the last one says why it ended.

    The last token that was known at the start comes once more; so does the last one where the pool
    has no room to go on.
    cached_tokens: leading tokens of the prompt that were not computed here
    logprobs:      of the token, where they are wanted; before them those of the prompt
    """

    rid: str
    index: int
    token: int
    finish_reason: str | None = None
    cached_tokens: int = 0
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True)
class Prefilled:
    """A prompt is computed, its records are final and held.

    finish_reason: there is nothing to decode, so nothing need be sent
    encode_ms:     time spent compressing it
    cached_tokens: leading ones that were not computed
    logprobs:      of the first token, where they are wanted
    errors:        of attention outputs, by codec and layer group, where `error_probe.py` measured them
    """

    rid: str
    first_token: int
    finish_reason: str | None
    encode_ms: float
    cached_tokens: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    errors: Mapping[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """A sequence decodes no longer: its records are final and held. `emitted`: its whole answer."""

    rid: str
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class Failed:
    """A request that ends without its answer; everything of it is freed."""

    rid: str
    error: DisaggError


@dataclass(frozen=True)
class EngineLoad:
    """Sequences by what they do, and what could be taken now.

    waiting:    for room or for their turn
    free_bytes: of the pool, beside what is kept free for sequences that grow
    slots:      more sequences that may compute
    """

    running: int = 0
    waiting: int = 0
    held: int = 0
    free_bytes: int = 0
    slots: int = 0


@dataclass
class StepOutput:
    """What one step brought; the engine that made it keeps no hold of it."""

    tokens: list[Token] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


# torch of a host without memory, and of a driver that wanted some for itself
FULL = "can't allocate memory", "CUDA error: out of memory"


def named(error: BaseException) -> DisaggError:
    """An error that can be told to others, without the frames and the tensors that it came by."""
    if isinstance(error, DisaggError):
        return error.with_traceback(None)
    log.error("a request broke", exc_info=error)
    kind = CapacityError if is_memory_error(error) else DisaggError
    return kind(f"{type(error).__name__}: {error}")


def is_memory_error(error: BaseException) -> bool:
    """Whether there was not enough memory, on a host or a device."""
    full = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return full or any(words in str(error) for words in FULL)
