"""Exact K and V of prompts computed here, cached in raw pages for prompts with the same prefix.

    restore   cached leading units          ──► workspace of a new prompt: not computed again
              of layers with a window: only the last units that the window shows
    write     units that a chunk completes  ──► raw pages, layer by layer
    close     after the step                ──► cached under their keys, until room is needed

A unit is the tokens of one raw page. Prompts attend exactly whatever their codec, so their K and V
depend on the tokens before alone: one copy serves all codecs. Each unit also has a note: the sums
of squares of queries by which channels are ordered. Pages are owned only while a step reads or
writes them, so they take no room from sequences. (`transfer/prefix_cache.py` is about compressed
pages that a decode worker received; `router/prefix_index.py` about which worker has which prefix.)
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from disagg.codecs.exact import exact_format, raw_blocks
from disagg.codecs.planning import KVShape, parse_plan
from disagg.engine.arena import wait_for_kernels
from disagg.engine.sequence import Sequence
from disagg.errors import CapacityError
from disagg.kernels.ops import gather_raw, store_blocks
from disagg.kernels.sealing import Target
from disagg.kv.page import RAW_TOKENS
from disagg.kv.page_cache import CachedPages
from disagg.kv.plan import Plan
from disagg.kv.pool import Pool
from disagg.kv.prefix_keys import content_keys
from disagg.model.cache import Workspace

# stands in the keys for the model's fingerprint: raw pages that were handed off have other keys
MODEL = "computed here"


@dataclass(frozen=True)
class NewUnits:
    """Units of a prompt that a step completes.

    first: the first unit of them
    done:  tokens of the prompt that are computed after the step
    pages: per layer group, a raw page for each unit; empty: none are cached
    """

    sequence: Sequence
    first: int
    done: int
    pages: Seq[Seq[int]]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The pages as tensors on the host."""
        return tuple(torch.tensor(pages, dtype=torch.int32) for pages in self.pages)

    @property
    def all_pages(self) -> list[int]:
        """The pages of all groups."""
        return list(chain.from_iterable(self.pages))


class ExactPrefixes:
    """The prefix cache of one engine, in raw pages. On the engine's thread.

    Layers of the same shape are a group with records of its own.
    """

    def __init__(
        self, pool: Pool, arena: Tensor, shape: KVShape, followed: bool = False
    ):
        """
        followed: other ranks read the pages of a prefix in the step after this one has
        """
        self._plan = prefix_plan(shape)
        self._followed = followed
        self._unread: list[Seq[Seq[CachedPages]]] = []  # by followers
        self._pool = pool
        self._arena = arena
        self._new: list[NewUnits] = []

    def restore(
        self,
        sequence: Sequence,
        limit: int,
        resume: Callable[[int], int] | None = None,
    ) -> int:
        """Fill a workspace with the cached leading tokens, at most `limit`; returns how many.

        resume: called with the tokens that are cached; gives those behind which the model can go
                on, which are no more. None: it can go on behind all
        """
        sequence.keys = content_keys(
            MODEL, self._plan, sequence.request.tokens, sequence.is_long
        )
        cached, num_units = self._find(sequence, limit // RAW_TOKENS)
        sequence.stored_units = num_units
        if resume is not None:
            self._release(cached)
            resumed = resume(num_units * RAW_TOKENS)
            cached, num_units = self._find_all(sequence, resumed // RAW_TOKENS)
        num_tokens = num_units * RAW_TOKENS
        try:
            if num_units:
                self._read(sequence, cached, num_tokens)
                self._mark_used(sequence, num_units)
        finally:
            if self._followed:
                self._unread.append(cached)
            else:
                self._release(cached)
        return num_tokens

    def open(self, sequence: Sequence, done: int) -> NewUnits:
        """Pages for the units that a chunk up to token `done` completes.

        Without room the units of this chunk and of all later ones stay uncached.
        """
        first = sequence.stored_units
        last = min([done // RAW_TOKENS, *map(len, sequence.keys or [()])])
        pages: list[list[int]] = []
        if last > first:
            try:
                for group in self._plan.groups:
                    record = group.record(group.raw)
                    pages.append(self._pool.claim(record, last - first))
            except CapacityError:
                self._pool.release(list(chain.from_iterable(pages)))
                pages = []
                sequence.keys = [keys[:first] for keys in sequence.keys]
        units = NewUnits(sequence, first, done, pages)
        self._new.append(units)
        return units

    def write(
        self, units: NewUnits, layer: int, k: Tensor, v: Tensor, tables: Seq[Tensor]
    ) -> None:
        """Write one layer of new units.

        k, v:   [H, n, D] of the last n tokens so far
        tables: `units.tables` on the device
        """
        write_units(
            self._plan, self._arena, units.first, units.done, layer, k, v, tables
        )

    def close(self, whole: bool) -> None:
        """After a step: cache the units that all layers have written.

        whole: whether the step was completed; else nothing is cached
        """
        while self._unread:
            self._release(self._unread.pop())
        while self._new:
            units = self._new.pop(0)
            try:
                if whole and units.sequence.error is None and units.pages:
                    self._cache(units)
            finally:
                self._pool.release(units.all_pages)

    def _cache(self, new: NewUnits) -> None:
        sequence = new.sequence
        assert sequence.workspace is not None
        units = range(new.first, new.first + len(new.pages[0]))
        notes = [sequence.workspace.squares(unit) for unit in units]
        for keys, pages in zip(sequence.keys, new.pages, strict=True):
            for unit, page, note in zip(units, pages, notes, strict=True):
                self._pool.keep(keys[unit], [page], note)
        sequence.stored_units = units.stop
        self._mark_used(sequence, sequence.stored_units)

    def _first_units(self, sequence: Sequence, num_units: int) -> list[int]:
        """Per group, the first unit that a prompt needs of its `num_units` cached ones."""
        reaches = sequence.plan.reaches
        first_units = []
        for group in self._plan.groups:
            group_reaches = [reaches[layer] for layer in group.layers]
            tokens = [reach for reach in group_reaches if reach is not None]
            if len(tokens) < len(group_reaches):  # a layer without a window needs all
                first_units.append(0)
            else:
                visible_units = -(-max(tokens) // RAW_TOKENS)
                first_units.append(max(0, num_units - visible_units))
        return first_units

    def _find(
        self, sequence: Sequence, limit: int
    ) -> tuple[list[list[CachedPages]], int]:
        """Per group, the pages of the longest cached prefix; and its units, at most `limit`.

        The caller owns the pages.
        """
        num_units = limit
        while True:
            first_units = self._first_units(sequence, num_units)
            cached = [
                self._pool.take(keys[first:num_units])
                for keys, first in zip(sequence.keys, first_units, strict=True)
            ]
            ends = [
                first + len(pages)
                for first, pages in zip(first_units, cached, strict=True)
            ]
            if min(ends) == num_units:
                return cached, num_units
            self._release(cached)
            num_units = min(ends)

    def _find_all(
        self, sequence: Sequence, num_units: int
    ) -> tuple[list[list[CachedPages]], int]:
        """Like `_find`, but exactly `num_units` units, or none if some of them were evicted."""
        cached, num_cached = self._find(sequence, num_units)
        if num_cached == num_units:
            return cached, num_units
        self._release(cached)
        sequence.stored_units = num_cached
        return [], 0

    def _mark_used(self, sequence: Sequence, num_units: int) -> None:
        """Note a use of the cached units of a prompt.

        Its first units are evicted last: without them the others cannot be found.
        """
        first_units = self._first_units(sequence, num_units)
        for keys, first in zip(sequence.keys, first_units, strict=True):
            self._pool.used(keys[first:num_units])

    def _release(self, cached: Seq[Seq[CachedPages]]) -> None:
        self._pool.release([page for units in cached for page in _pages_of(units)])

    def _read(
        self, sequence: Sequence, cached: Seq[Seq[CachedPages]], done: int
    ) -> None:
        """Copy cached K and V, and the notes, into the workspace of a prompt."""
        workspace = sequence.workspace
        assert workspace is not None
        sequence.prefix_pages = [_pages_of(units) for units in cached]
        squares: list[Tensor] = []
        for units in cached:
            if len(units) * RAW_TOKENS == done:
                notes = [unit.note for unit in units]
                squares = [note for note in notes if isinstance(note, Tensor)]
                break
        pages = sequence.prefix_pages
        read_units(self._plan, self._arena, workspace, pages, squares, done)


def prefix_plan(shape: KVShape) -> Plan:
    """The raw pages of the prefix cache.

    Without windows, so that no page is dropped while a prompt grows.
    """
    plan = parse_plan("raw", replace(shape, states=()))
    groups = tuple(replace(group, window=None) for group in plan.groups)
    return replace(plan, groups=groups)


def write_units(
    plan: Plan,
    arena: Tensor,
    first: int,
    done: int,
    layer: int,
    k: Tensor,
    v: Tensor,
    tables: Seq[Tensor],
) -> None:
    """Write one layer of new units into the raw pages of a plan.

    first: the first unit of them · done: tokens of the prompt up to the end of k
    k, v:   [H, n, D] of the last n tokens so far
    tables: pages by layer group, on the device; empty: nothing is cached
    """
    if not tables:
        return
    index = plan.group_of[layer]
    group = plan.groups[index]
    page_ids = tables[index]
    before = done - k.shape[1]
    start = first * RAW_TOKENS - before
    tokens = slice(start, start + len(page_ids) * RAW_TOKENS)
    target = Target(arena, page_ids, group.layer_offset(group.raw, layer))
    store_blocks(target, raw_blocks(k[:, tokens], v[:, tokens]))


def read_units(
    plan: Plan,
    arena: Tensor,
    workspace: Workspace,
    pages: Seq[Seq[int]],
    squares: Seq[Tensor],
    done: int,
) -> None:
    """Copy the cached K and V of `done` tokens, and the notes, into the workspace of a prompt.

    pages: by layer group, the last ones of the prefix
    """
    if squares:
        workspace.recall(torch.stack([*squares]).to(arena.device))
    for group, group_pages in zip(plan.groups, pages, strict=True):
        ids = torch.tensor([group_pages], dtype=torch.int32, device=arena.device)
        fmt = exact_format(group.raw)
        for layer in group.layers:
            base = group.layer_offset(group.raw, layer)
            k, v = gather_raw(arena, ids, fmt, base, group.heads)
            workspace.extend(layer, k[0], v[0], done - k.shape[2])
    # others may write to these pages once they are released
    wait_for_kernels(arena.device)


def _pages_of(units: Seq[CachedPages]) -> list[int]:
    return [page for unit in units for page in unit.pages]
