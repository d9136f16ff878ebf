"""Snapshots of states: a hybrid model resumes a cached prefix from the copies in them.

    take      a layer has passed the tokens before a border   ──► its record, copied to a new one
    close     after the step                                  ──► cached under the key of the prefix
    restore   the newest snapshot within a cached prefix      ──► the records of a new prompt

`kv/snapshot_borders.py` says at which tokens. A snapshot has a record for each layer with a state,
and they are cached and evicted together. As with exact K and V (`exact_prefixes.py`), records are
owned only while a step reads or writes them: sequences take their room when they need it.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from disagg.engine.arena import wait_for_kernels
from disagg.engine.sequence import Sequence
from disagg.errors import CapacityError
from disagg.kv.page import RAW_TOKENS, record_span
from disagg.kv.plan import LayerGroup, RecordShape
from disagg.kv.pool import Pool

STATES = b"states"  # in the keys of snapshots, behind the key of the prefix


@dataclass(frozen=True)
class NewSnapshot:
    """A snapshot that a step takes of a sequence, behind `border` tokens.

    pages: of its records, by layer with a state
    """

    sequence: Sequence
    border: int
    pages: Seq[int]


class StateSnapshots:
    """The snapshots of one engine. On the engine's thread.

    count: how many are cached at most
    """

    def __init__(
        self, pool: Pool, arena: Tensor, groups: Seq[LayerGroup], share: float
    ):
        """groups: of the layers with a state, at least one · share: of the arena, for snapshots"""
        self._shapes = [group.record(group.page) for group in groups]
        snapshot_bytes = sum(shape.nbytes for shape in self._shapes)
        self.count = int(share * pool.arena.nbytes) // snapshot_bytes
        self._pool = pool
        self._arena = arena
        self._new: dict[bytes, NewSnapshot] = {}
        # keys in the order of use; the pool may have evicted their snapshots
        self._keys: dict[bytes, None] = {}

    def restore(self, sequence: Sequence, limit: int) -> int:
        """Copy the newest snapshot within the first `limit` tokens to the records of a prompt.

        Returns the tokens before that snapshot; 0: there is none.
        """
        borders = _keys_of(sequence, range(RAW_TOKENS, limit + 1, RAW_TOKENS))
        border_of = {key: border for border, key in borders.items()}
        for key in reversed(self._pool.kept_of(border_of)):
            if self._read(key, sequence):
                return border_of[key]
        return 0

    def plan(self, sequence: Sequence, borders: Iterable[int]) -> None:
        """Let a prompt take snapshots behind these tokens, as it computes them."""
        sequence.borders = _keys_of(sequence, borders) if self.count else {}

    def open(self, sequence: Sequence, end: int) -> list[int]:
        """The borders of a chunk up to token `end` behind which the coming step takes snapshots.

        Without room for one, it takes none there.
        """
        return [
            border
            for border, key in sequence.borders.items()
            if sequence.n < border <= end and self._claim(sequence, border, key)
        ]

    def take(self, sequence: Sequence, border: int, layer: int) -> None:
        """Copy the state of a layer that has passed `border` tokens of a prompt.

        Does nothing where the step takes no snapshot.
        """
        key = sequence.borders.get(border, b"")
        new = self._new.get(key)
        if new is not None and new.sequence is sequence:
            self._copy(layer, sequence.state_pages[layer], new.pages[layer])

    def close(self, whole: bool) -> None:
        """After a step: cache the snapshots whose K and V will be cached too.

        They count as used before K and V, so that they are evicted first: that frees the most.

        whole: whether the step was completed; else nothing is cached
        """
        for key, new in self._new.items():
            cacheable = len(new.sequence.keys[0]) * RAW_TOKENS
            if whole and new.sequence.error is None and new.border <= cacheable:
                self._pool.keep(key, new.pages, note=None)
                self._mark_used(key)
            self._pool.release(new.pages)
        self._new.clear()

    def _claim(self, sequence: Sequence, border: int, key: bytes) -> bool:
        """Get records for a new snapshot, owned until `close`; False: no room, or none needed."""
        if key in self._new or self._pool.kept_of([key]):
            return False
        self._evict_beyond(self.count - 1)
        pages: dict[RecordShape, list[int]] = {}
        try:
            for shape, count in Counter(self._shapes).items():
                pages[shape] = self._pool.claim(shape, count)
        except CapacityError:
            self._pool.release(chain.from_iterable(pages.values()))
            return False
        by_layer = [pages[shape].pop() for shape in self._shapes]
        self._new[key] = NewSnapshot(sequence, border, by_layer)
        return True

    def _evict_beyond(self, count: int) -> None:
        """Leave `count` snapshots at most, those used last."""
        keys = self._pool.kept_of(self._keys)
        num_evicted = max(0, len(keys) - count)
        for key in keys[:num_evicted]:
            self._pool.drop(key)
        self._keys = dict.fromkeys(keys[num_evicted:])

    def _read(self, key: bytes, sequence: Sequence) -> bool:
        """Copy a snapshot to the records of a prompt; False: it was evicted meanwhile."""
        cached = self._pool.take([key])
        if not cached:
            return False
        pages = cached[0].pages
        try:
            for layer, page in enumerate(pages):
                self._copy(layer, page, sequence.state_pages[layer])
            # others may write to these pages once they are released
            wait_for_kernels(self._arena.device)
        finally:
            self._pool.release(pages)
        self._mark_used(key)
        return True

    def _copy(self, layer: int, source: int, target: int) -> None:
        """Copy a record of a layer, by the pages of both."""
        nbytes = self._shapes[layer].nbytes
        state = self._arena[record_span(source, nbytes)]
        self._arena[record_span(target, nbytes)] = state

    def _mark_used(self, key: bytes) -> None:
        self._pool.used([key])
        self._keys.pop(key, None)
        self._keys[key] = None


def _keys_of(sequence: Sequence, borders: Iterable[int]) -> dict[int, bytes]:
    """The keys of snapshots of a prompt, by border: the key of K and V there, and a tag."""
    units = sequence.keys[0]
    return {border: units[border // RAW_TOKENS - 1] + STATES for border in borders}
