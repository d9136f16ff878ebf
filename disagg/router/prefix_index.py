"""Which beginnings of prompts a worker has, as far as its router can tell: by what it was given.

A worker keeps what it computed or received until it needs the room, and does not say when that is.
So this is a guess; where it is wrong, a prompt costs what one costs that nobody knows.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

UNIT_TOKENS = 64
MOST_UNITS = 1 << 15  # remembered of each worker: 2 million tokens
KEY_BYTES = 12


def keys_of(prompt: Sequence[int], codec: str = "") -> tuple[bytes, ...]:
    """A key for each 64 tokens of a prompt and all before; of its pages by a codec, or exact."""
    view = memoryview(array("q", prompt))
    chain, keys = blake2b(repr(codec).encode(), digest_size=KEY_BYTES), list[bytes]()
    for end in range(UNIT_TOKENS, len(prompt) + 1, UNIT_TOKENS):
        chain.update(view[end - UNIT_TOKENS : end])
        keys.append(chain.digest())
    return tuple(keys)


class KnownPrefixes:
    """The beginnings that one worker has; those of no use for longest are forgotten."""

    def __init__(self) -> None:
        self._units: OrderedDict[bytes, None] = OrderedDict()

    def tokens(self, keys: Sequence[bytes]) -> int:
        """How many leading tokens of a prompt of these keys it has."""
        unknown = (i for i, key in enumerate(keys) if key not in self._units)
        return UNIT_TOKENS * next(unknown, len(keys))

    def add(self, keys: Sequence[bytes]) -> None:
        """It has all of a prompt; without its first units the others are of no use."""
        for key in reversed(keys):
            self._units[key] = None
            self._units.move_to_end(key)
        while len(self._units) > MOST_UNITS:
            self._units.popitem(last=False)


def reason_of(chosen: int, most: int) -> str:
    """Why a worker that knows `chosen` tokens of a prompt was taken, where one knows `most`."""
    if not most:
        return "nobody_knows_it"
    return "knows_most" if chosen == most else "has_less_to_do"
