"""Grammars in the steps of an engine: masks of the tokens that may come next.

    engine thread    follow the last token ─ feed ─ forward ──────────────► sample ─ follow ...
    mask thread                                └─► masks of the rows ──────┘

A mask is a pure function of the tokens of an answer, so replays, moves, preemption and drafts have
the masks of an undisturbed answer. The state of each sequence is stored only because it is faster
to follow one token than all. Sequences without a grammar cost nothing here.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.sequence import Request, Sequence
from disagg.errors import DisaggError
from disagg.grammar.compiler import GrammarCompiler
from disagg.grammar.state import Bits, GrammarState
from disagg.grammar.vocabulary import Vocabulary
from disagg.model.describe import ModelInfo
from disagg.model.tokenizer import Tokenizer

WORD_BITS = 32


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens may come next, for the rows of a batch that have a grammar.

    rows:   their numbers
    bits:   [rows, words] int32; token i is bit i % 32 of word i // 32
    errors: by row, why it has no next token
    """

    rows: tuple[int, ...] = ()
    bits: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    errors: Mapping[int, DisaggError] = field(default_factory=dict)

    def of_row(self, row: int) -> "TokenMasks":
        """The mask of one row, as that of a batch of its own."""
        if row not in self.rows:
            return NO_MASKS
        index = self.rows.index(row)
        return TokenMasks((0,), self.bits[index : index + 1])

    def applied(self, logits: Tensor) -> Tensor:
        """Logits [B, V] in which tokens that may not come are minus infinity."""
        if not self.rows:
            return logits
        is_forbidden = _forbidden(self.bits, logits)
        if len(self.rows) == len(logits):
            return logits.masked_fill(is_forbidden, -torch.inf)
        rows = torch.tensor(self.rows, device=logits.device)
        return logits.index_copy(
            0, rows, logits[rows].masked_fill_(is_forbidden, -torch.inf)
        )


def _forbidden(bits: NDArray[np.int32], logits: Tensor) -> Tensor:
    """Bits [rows, words] as booleans [rows, V], true for tokens that may not come."""
    vocab_size = logits.shape[-1]
    if logits.device.type == "cpu":  # one call in place of five
        forbidden = np.unpackbits(
            ~bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little"
        )
        return torch.from_numpy(forbidden).view(torch.bool)
    words = torch.from_numpy(~bits).to(logits.device)
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    is_forbidden = (words[:, :, None] >> shifts & 1).bool().flatten(1)
    return is_forbidden[:, :vocab_size]


NO_MASKS = TokenMasks()
Masks = Callable[[], TokenMasks]  # waits for them


class SequenceGrammars:
    """The grammars of an engine's sequences. Only the engine's thread calls it."""

    def __init__(self, compiler: GrammarCompiler, eos_ids: Seq[int]):
        """eos_ids: of the model; these and stop tokens may come where the text may end."""
        self._compiler = compiler
        self._eos_ids = eos_ids
        self._states: WeakKeyDictionary[Sequence, GrammarState] = WeakKeyDictionary()
        self._making: Future[TokenMasks] | None = None

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="masks")

    def is_ready(
        self, request: Request, on_ready: Callable[[Future[GrammarState]], None]
    ) -> bool:
        """Whether the grammar of a request is compiled, or failed to; else `on_ready` follows.

        on_ready: called from another thread; while what it gets is held, the request can begin
                  at once
        """
        if not request.params.grammar:
            return True
        future = self._compiler.prepare(request.params.grammar)
        if future.done():
            return True
        future.add_done_callback(on_ready)
        return False

    def begin(self, sequence: Sequence) -> None:
        """RequestError if the grammar of a sequence cannot be followed through its tokens."""
        if sequence.request.params.grammar:
            self._state(sequence)

    def is_complete(self, sequence: Sequence) -> bool:
        """Whether the text of its grammar ends here, so that nothing may follow.

        RequestError if the grammar does not allow its last token.
        """
        if not sequence.request.params.grammar:
            return False
        return self._state(sequence).is_complete

    def forced(self, sequence: Sequence, most: int) -> list[int]:
        """The tokens that its grammar forces to come next, at most `most`."""
        if not sequence.request.params.grammar:
            return []
        return self._state(sequence).forced(most)

    def cut_drafts(self, scheduled: Seq[ScheduledTokens]) -> list[ScheduledTokens]:
        """The tokens of a step with drafts that their grammars allow."""
        return [self._with_cut_draft(entry) for entry in scheduled]

    def _with_cut_draft(self, entry: ScheduledTokens) -> ScheduledTokens:
        if not entry.draft or not entry.sequence.request.params.grammar:
            return entry
        num_allowed = self._state(entry.sequence).num_allowed(entry.draft)
        num_cut = len(entry.draft) - num_allowed
        draft = entry.draft[:num_allowed]
        return replace(entry, count=entry.count - num_cut, draft=draft)

    def begin_masks(self, entries: Seq[ScheduledTokens]) -> Masks:
        """Make the masks of the tokens that entries sample, while the model computes.

        entries: those that complete their sequence, in the order of the batch's rows
        """
        jobs = []
        row = 0
        for entry in entries:
            if entry.sequence.request.params.grammar:
                jobs.append(_MaskJob(row, entry, self._state(entry.sequence)))
            row += entry.choices
        if not jobs:
            return lambda: NO_MASKS
        self._making = self._thread.submit(self._make, jobs)
        return self._making.result

    def _state(self, sequence: Sequence) -> GrammarState:
        """Where a sequence stands in its grammar."""
        if self._making is not None:
            wait([self._making])  # a step that broke did not wait for its masks
        params = sequence.request.params
        state = self._states.get(sequence)
        if state is None:
            state = self._compiler.prepare(params.grammar).result().copy()
            self._states[sequence] = state
        tokens = sequence.emitted
        has_ended = tokens and tokens[-1] in params.ends(self._eos_ids)
        state.follow(tokens[:-1] if has_ended else tokens)
        return state

    def _make(self, jobs: Seq["_MaskJob"]) -> TokenMasks:
        vocabulary = self._compiler.vocabulary
        rows: list[int] = []
        masks: list[Bits] = []
        errors: dict[int, DisaggError] = {}
        for job in jobs:
            ends = job.entry.sequence.request.params.ends(self._eos_ids)
            for count in range(job.entry.choices):
                row = job.row + count
                rows.append(row)
                try:
                    bits = job.state.bits(job.entry.draft[:count])
                    masks.append(_with_ends(bits, vocabulary, ends))
                except DisaggError as error:
                    errors[row] = error
                    masks.append(_everything(vocabulary))
        words: NDArray[np.int32] = np.stack(masks).view(np.int32)
        return TokenMasks(tuple(rows), words, errors)


@dataclass(frozen=True)
class _MaskJob:
    """The masks of one sequence; row: of the first."""

    row: int
    entry: ScheduledTokens
    state: GrammarState


def _with_ends(bits: Bits, vocabulary: Vocabulary, ends: Seq[int]) -> Bits:
    """A mask with the tokens that end an answer where the text of the grammar may end.

    Elsewhere it is without them, even if they are ordinary text; unless no other token is allowed.
    Behind a draft with which the text ends, everything is allowed: the answer is over by then.
    """
    end = vocabulary.end
    may_end = bits[end // WORD_BITS] >> end % WORD_BITS & 1
    end_bits = _bits_of([token for token in ends if token < end], vocabulary)
    if not may_end:
        others = bits & ~end_bits
        return others if others.any() else bits
    bits = bits & ~_bits_of([end], vocabulary) | end_bits
    return bits if bits.any() else _everything(vocabulary)


def _bits_of(tokens: Seq[int], vocabulary: Vocabulary) -> Bits:
    """A mask that allows these tokens alone."""
    bits = np.zeros(vocabulary.words, np.uint32)
    for token in tokens:
        bits[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)
    return bits


def _everything(vocabulary: Vocabulary) -> Bits:
    return np.full(vocabulary.words, 2**WORD_BITS - 1, np.uint32)


def compiler_for(info: ModelInfo) -> GrammarCompiler:
    """Compiles grammars for the vocabulary of a model, which is read for the first one."""

    def read() -> Vocabulary:
        tokenizer = Tokenizer.load(info.path)
        tokens = tokenizer.token_bytes(info.vocab_size)
        special = tokenizer.special_tokens
        encode = partial(tokenizer.encode, special=False)
        return Vocabulary(tokens, special, encode)

    return GrammarCompiler(read)
