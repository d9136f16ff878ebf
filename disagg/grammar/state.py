"""Where an answer stands in its grammar: a pure function of its tokens."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from disagg.errors import RequestError
from disagg.grammar.limits import parser_limits, short_error
from disagg.grammar.vocabulary import Vocabulary

Bits = NDArray[np.uint32]  # [words]; token i is bit i % 32 of word i // 32


class GrammarState:
    """A grammar behind some tokens. One thread at a time may use it."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._length = 0
        # tokens that come next in any case, from an index on; a long text takes long to split
        self._forced: list[int] = []
        self._forced_from = 0

    @classmethod
    def compile(cls, constraint: str, vocabulary: Vocabulary) -> "GrammarState":
        """The start of a grammar; RequestError if this vocabulary cannot follow it."""
        matcher = LLMatcher(
            vocabulary.compiled, constraint, log_level=0, limits=parser_limits()
        )
        state = cls(matcher, vocabulary)
        state._check("is not supported")
        if state.is_complete:
            raise RequestError("the grammar allows an empty text only", "grammar")
        return state

    def copy(self) -> "GrammarState":
        """An equal state that goes its own way."""
        copy = GrammarState(self._matcher.deep_copy(), self._vocabulary)
        copy._length = self._length
        return copy

    def follow(self, tokens: Sequence[int]) -> None:
        """Go to the state behind `tokens`, which begin with those behind which it is.

        RequestError where the grammar does not allow them, or is too complex behind them.
        """
        new_tokens = list(tokens[self._length :])
        if new_tokens and not self._matcher.consume_tokens(new_tokens):
            self._check("does not allow the tokens so far, or is too complex")
        self._length = len(tokens)
        for token in new_tokens:
            self._follow_forced(token)

    def _follow_forced(self, token: int) -> None:
        if self._forced[self._forced_from : self._forced_from + 1] == [token]:
            self._forced_from += 1
        else:
            self._forced = []

    def num_allowed(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft may come next."""
        return self._matcher.validate_tokens(list(draft))

    def forced(self, most: int) -> list[int]:
        """At most `most` tokens that come next whatever the model likes; often none."""
        if self._forced_from >= len(self._forced):
            self._forced = self._matcher.compute_ff_tokens()
            self._forced_from = 0
        return self._forced[self._forced_from : self._forced_from + most]

    @property
    def may_end(self) -> bool:
        """Whether the text of the grammar may end here."""
        return self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether the text of the grammar ends here: nothing may follow."""
        if self._matcher.is_stopped():
            return True
        if not self.may_end:
            return False
        bits = self.bits()
        end = self._vocabulary.end
        bits[end // 32] &= ~np.uint32(1 << end % 32)
        return not bits.any()

    def bits(self, draft: Sequence[int] = ()) -> Bits:
        """Which tokens may come next, behind a draft that the grammar allows.

        The bit of `Vocabulary.end` says that the text may end here.
        """
        if draft and not self._matcher.consume_tokens(list(draft)):
            self._check("does not allow a draft")
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32).copy()
        if draft:
            self._matcher.rollback(len(draft))
        self._check("is too complex behind the tokens so far")
        return bits

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            error = short_error(self._matcher.get_error())
            raise RequestError(f"the grammar {what}: {error}", "grammar")
