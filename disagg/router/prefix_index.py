"""Which prefixes of prompts a worker has in its cache: a guess from what the router sent there.

A worker caches the KV of its prompts until it needs the room, and does not report when it drops an
entry. A wrong guess costs no more than a prompt without a cached prefix.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from disagg.kv.snapshot_borders import snapshot_borders

UNIT_TOKENS = 64
MAX_UNITS = 1 << 15  # remembered of each worker: 2 million tokens
KEY_BYTES = 12
TAG_BYTES = 4  # of a codec


def keys_of(prompt: "array[int]") -> tuple[bytes, ...]:
    """Keys of the prefixes of a prompt with 64, 128, 192 ... tokens."""
    tokens = memoryview(prompt)
    chain = blake2b(digest_size=KEY_BYTES)
    keys: list[bytes] = []
    for end in range(UNIT_TOKENS, len(prompt) + 1, UNIT_TOKENS):
        chain.update(tokens[end - UNIT_TOKENS : end])
        keys.append(chain.digest())
    return tuple(keys)


def page_keys_of(keys: Sequence[bytes], codec: str) -> tuple[bytes, ...]:
    """Keys of the same prefixes as pages of a codec."""
    tag = blake2b(codec.encode(errors="surrogatepass"), digest_size=TAG_BYTES).digest()
    return tuple(key + tag for key in keys)


class KnownPrefixes:
    """The prefixes that one worker has. They are forgotten a half at a time, the older half first.

    Two plain tables take half of the memory of one that is in order of use.
    """

    def __init__(self) -> None:
        self._recent: dict[bytes, None] = {}
        self._older: dict[bytes, None] = {}

    def tokens(self, keys: Sequence[bytes]) -> int:
        """Length of the longest prefix with one of these keys that the worker has."""
        for index, key in enumerate(keys):
            if key not in self._recent and key not in self._older:
                return UNIT_TOKENS * index
        return UNIT_TOKENS * len(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        """The worker has a whole prompt.

        The shortest prefixes become the most recent, because the longer ones need them.
        """
        for key in reversed(keys):
            if len(self._recent) >= MAX_UNITS // 2 and key not in self._recent:
                self._older = self._recent
                self._recent = {}
            self._recent[key] = None


class KnownSnapshots:
    """The snapshots of states that one worker has, where its model keeps states.

    They are expected where its engine takes them, and forgotten in the order of use.
    """

    def __init__(self, count: int):
        """count: how many the worker caches at most"""
        self._count = count
        self._keys: dict[bytes, None] = {}

    def tokens(self, keys: Sequence[bytes], cached_tokens: int) -> int:
        """Leading tokens of a prompt that the worker need not compute.

        keys: of its prefixes · cached_tokens: those whose K and V the worker has
        """
        for units in range(cached_tokens // UNIT_TOKENS, 0, -1):
            if keys[units - 1] in self._keys:
                return UNIT_TOKENS * units
        return 0

    def add(self, keys: Sequence[bytes], tokens: int, cached_tokens: int) -> None:
        """The worker computes a prompt of so many tokens, of which it had some in its cache."""
        resumed = self.tokens(keys, cached_tokens)
        borders = [resumed, *snapshot_borders(tokens, cached_tokens, resumed)]
        for units in [border // UNIT_TOKENS for border in borders if border]:
            key = keys[units - 1]
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._count:
            del self._keys[next(iter(self._keys))]


def reason_of(tokens: int, longest: int) -> str:
    """Label of a choice in the metrics.

    tokens:  of the prompt that the chosen worker has in its cache
    longest: the same of the worker that has most of it
    """
    if not longest:
        return "nobody_knows_it"
    return "knows_most" if tokens == longest else "has_less_to_do"
