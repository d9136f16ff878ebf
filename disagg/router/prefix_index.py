"""Which beginnings of prompts a worker has, as far as the router can tell from what it sent there.

A worker keeps what it computed or received until it needs the room, and does not report when it
drops it. So this is a guess; a wrong one costs as much as a prompt without a cached prefix.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

UNIT_TOKENS = 64
MAX_UNITS = 1 << 15  # remembered of each worker: 2 million tokens
KEY_BYTES = 12


def keys_of(prompt: Sequence[int], codec: str = "") -> tuple[bytes, ...]:
    """A key for each 64 tokens of a prompt together with all tokens before.

    codec: of its pages; "" for the tokens themselves
    """
    tokens = memoryview(array("q", prompt))
    chain = blake2b(repr(codec).encode(), digest_size=KEY_BYTES)
    keys: list[bytes] = []
    for end in range(UNIT_TOKENS, len(prompt) + 1, UNIT_TOKENS):
        chain.update(tokens[end - UNIT_TOKENS : end])
        keys.append(chain.digest())
    return tuple(keys)


class KnownPrefixes:
    """The beginnings that one worker has; the least recently used ones are forgotten."""

    def __init__(self) -> None:
        self._units: OrderedDict[bytes, None] = OrderedDict()

    def tokens(self, keys: Sequence[bytes]) -> int:
        """How many leading tokens of a prompt with these keys the worker has."""
        for index, key in enumerate(keys):
            if key not in self._units:
                return UNIT_TOKENS * index
        return UNIT_TOKENS * len(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        """The worker has all of a prompt.

        Its first units become the most recent: without them the others are of no use.
        """
        for key in reversed(keys):
            self._units[key] = None
            self._units.move_to_end(key)
        while len(self._units) > MAX_UNITS:
            self._units.popitem(last=False)


def reason_of(tokens: int, longest: int) -> str:
    """Why a worker was chosen that has `tokens` of a prompt, where the best has `longest`."""
    if not longest:
        return "nobody_knows_it"
    return "knows_most" if tokens == longest else "has_less_to_do"
