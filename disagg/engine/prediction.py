"""OpenAI's predicted outputs: the text that an answer is expected to be, but for a few changes.

    prediction   a b c d e f g h │ i j
    answer       a b c x f g h   │         matched: a b c, f g h; i j is expected next

An answer is followed through its prediction, forwards only. Behind a token that the prediction does
not have, the place is lost, until the last MATCH tokens of the answer are found further on.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

MATCH = 3  # tokens that find the place again


class FollowedPrediction:
    """A prediction, and how far an answer has come in it.

    matched: tokens of the prediction that the answer has so far
    """

    def __init__(self, tokens: Seq[int]):
        self.matched = 0
        self._tokens = np.asarray(tokens, np.uint32)
        self._place = 0
        # the last tokens of the answer since its place was lost
        self._unmatched: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def follow(self, answer: Iterable[int]) -> None:
        """The next tokens of the answer."""
        if not len(self):
            return
        for token in answer:
            self._follow(token)

    def _follow(self, token: int) -> None:
        if token in self.continuation(1):
            self._advance(self._place, 1)
            return
        self._unmatched = [*self._unmatched, token][-MATCH:]
        places = self._places(self._unmatched)
        if places.size:
            self._advance(self._place + int(places[0]), MATCH)

    def _places(self, run: Seq[int]) -> np.ndarray:
        """Where MATCH tokens stand, counted from the place on; nowhere if they are fewer."""
        ahead = self._tokens[self._place :]
        if len(run) < MATCH or len(ahead) < MATCH:
            return np.empty(0, np.int64)
        places = np.flatnonzero(ahead[: 1 - MATCH] == run[0])
        for offset in range(1, MATCH):
            places = places[ahead[places + offset] == run[offset]]
        return places

    def _advance(self, place: int, count: int) -> None:
        """The answer has `count` tokens from a place on."""
        self._place = place + count
        self._unmatched = []
        self.matched += count

    def continuation(self, size: int) -> list[int]:
        """At most `size` tokens that are expected next; none where the place is lost."""
        if self._unmatched:
            return []
        return self._tokens[self._place : self._place + size].tolist()
