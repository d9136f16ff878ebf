"""Exact K and V of prompts computed here, kept in raw pages for prompts that begin alike.

    restore   leading units that are kept   ──► workspace of a new prompt: not computed again
              of layers with a window: the last that it shows
    write     units that a chunk completes  ──► raw pages, layer by layer
    keep      after the step                ──► kept under their keys, until room is needed

Prompts attend exactly whatever their codec, so K and V depend on the tokens before and on nothing
else: one copy serves all codecs. Noted beside them are the sums of squares of queries by which
channels are ordered. Pages are owned only while somebody reads or writes them, so they take no room
that a sequence could have.
"""

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
from disagg.kv.pool import Pool
from disagg.kv.prefix_keys import content_keys

MODEL = (
    "computed here"  # no fingerprint: raw pages that were handed off have other keys
)


@dataclass(frozen=True)
class NewUnits:
    """Units of a prompt that a step completes, from the `first` on: a raw page for each, in each
    layer group; done: tokens computed after it."""

    sequence: Sequence
    first: int
    done: int
    pages: Seq[Seq[int]]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The pages as tensors on the host."""
        return tuple(torch.tensor(pages, dtype=torch.int32) for pages in self.pages)


class ExactPrefixes:
    """What prompts of one engine share of their K and V. On the engine's thread.

    Layers that see as much are a group with records of its own.
    """

    def __init__(self, pool: Pool, arena: Tensor, shape: KVShape):
        plan = parse_plan("raw", shape)
        groups = tuple(
            replace(group, window=None) for group in plan.groups
        )  # all is kept
        self._plan = replace(plan, groups=groups)
        self._format = exact_format(groups[0].raw)
        self._pool, self._arena = pool, arena
        self._new: list[NewUnits] = []

    def restore(self, sequence: Sequence, limit: int) -> int:
        """Fill a workspace with the leading tokens that are known, at most `limit`: how many."""
        sequence.keys = content_keys(MODEL, self._plan, sequence.request.tokens)
        found, count = self._find(sequence, limit // RAW_TOKENS)
        try:
            if count:
                self._read(sequence, found, count * RAW_TOKENS)
                self._use(sequence, count)
        finally:
            self._release(found)
        sequence.kept_units = count
        return count * RAW_TOKENS

    def open(self, sequence: Sequence, done: int) -> NewUnits:
        """Pages for what a chunk up to token `done` completes; without room, now or later, none."""
        first, pages = sequence.kept_units, list[list[int]]()
        count = max(
            0, min(done // RAW_TOKENS, *map(len, sequence.keys or [()])) - first
        )
        try:
            for group in self._plan.groups if count else ():
                pages.append(self._pool.claim(group.record(group.raw), count))
        except CapacityError:
            self._pool.release(list(chain.from_iterable(pages)))
            pages, sequence.keys = [], [keys[:first] for keys in sequence.keys]
        new = NewUnits(sequence, first, done, pages)
        self._new.append(new)
        return new

    def write(
        self, new: NewUnits, layer: int, k: Tensor, v: Tensor, tables: Seq[Tensor]
    ) -> None:
        """One layer of them: k, v [H, n, D] of the last n tokens so far; tables: on the device."""
        index = self._plan.group_of[layer]
        if tables:
            group, ids = self._plan.groups[index], tables[index]
            before = new.done - k.shape[1]
            some = slice(
                *(x * RAW_TOKENS - before for x in (new.first, new.first + len(ids)))
            )
            target = Target(self._arena, ids, group.layer_offset(group.raw, layer))
            store_blocks(target, raw_blocks(k[:, some], v[:, some]))

    def close(self, whole: bool) -> None:
        """After a step: keep what was written in all layers; nothing if the step broke.

        The first units of a prompt go last when room is needed: without them the others are lost.
        """
        while self._new:
            new = self._new.pop(0)
            try:
                if whole and new.sequence.error is None and new.pages:
                    self._keep(new)
            finally:
                self._pool.release(list(chain.from_iterable(new.pages)))

    def _keep(self, new: NewUnits) -> None:
        sequence = new.sequence
        assert sequence.workspace is not None
        units = range(new.first, new.first + len(new.pages[0]))
        notes = [sequence.workspace.squares(unit) for unit in units]
        for keys, pages in zip(sequence.keys, new.pages, strict=True):
            for unit, page, note in zip(units, pages, notes, strict=True):
                self._pool.keep(keys[unit], [page], note)
        sequence.kept_units = units.stop
        self._use(sequence, sequence.kept_units)

    def _starts(self, sequence: Sequence, count: int) -> list[int]:
        """Of each group the first unit that is wanted of a prompt of which `count` are known."""
        reaches, starts = sequence.plan.reaches, list[int]()
        for group in self._plan.groups:
            asked = [reaches[layer] for layer in group.layers]
            tokens = [x for x in asked if x is not None]
            all_of_them = len(tokens) < len(asked)
            starts.append(
                0 if all_of_them else max(0, count - -(-max(tokens) // RAW_TOKENS))
            )
        return starts

    def _find(
        self, sequence: Sequence, count: int
    ) -> tuple[list[list[CachedPages]], int]:
        """What is wanted of the most leading units that are known, at most `count`; and how many.

        The caller owns what was found.
        """
        while True:
            starts = self._starts(sequence, count)
            wanted = zip(sequence.keys, starts, strict=True)
            found = [self._pool.take(keys[start:count]) for keys, start in wanted]
            known = min(
                start + len(some) for start, some in zip(starts, found, strict=True)
            )
            if known == count:
                return found, count
            self._release(found)
            count = known

    def _use(self, sequence: Sequence, count: int) -> None:
        for keys, start in zip(
            sequence.keys, self._starts(sequence, count), strict=True
        ):
            self._pool.used(keys[start:count])

    def _release(self, found: Seq[Seq[CachedPages]]) -> None:
        self._pool.release(
            [page for some in found for kept in some for page in kept.pages]
        )

    def _read(
        self, sequence: Sequence, found: Seq[Seq[CachedPages]], done: int
    ) -> None:
        workspace = sequence.workspace
        assert workspace is not None
        whole = [some for some in found if len(some) * RAW_TOKENS == done]
        if squares := [
            x.note for some in whole[:1] for x in some if isinstance(x.note, Tensor)
        ]:
            workspace.recall(torch.stack(squares).to(self._arena.device))
        for group, some in zip(self._plan.groups, found, strict=True):
            pages = [[page for kept in some for page in kept.pages]]
            ids = torch.tensor(pages, dtype=torch.int32, device=self._arena.device)
            for layer in group.layers:
                base = group.layer_offset(group.raw, layer)
                k, v = gather_raw(self._arena, ids, self._format, base, group.heads)
                workspace.extend(layer, k[0], v[0], done - k.shape[2])
        wait_for_kernels(self._arena.device)  # before others may write to these pages
