"""Exact K and V of prompts computed here, kept in raw pages for prompts that begin alike.

    restore   leading units that are kept   ──► workspace of a new prompt: not computed again
    write     units that a chunk completes  ──► raw pages, layer by layer
    keep      after the step                ──► kept under their keys, until room is needed

Prompts attend exactly whatever their codec, so K and V depend on the tokens before and on nothing
else: one copy serves all codecs. Noted beside them are the sums of squares of queries by which
channels are ordered. Pages are owned only while somebody reads or writes them, so they take no room
that a sequence could have.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.codecs.exact import exact_format, raw_blocks
from disagg.codecs.planning import KVShape
from disagg.codecs.raw import Raw
from disagg.engine.arena import wait_for_kernels
from disagg.engine.sequence import Sequence
from disagg.errors import CapacityError
from disagg.kernels.ops import gather_raw, store_blocks
from disagg.kernels.sealing import Target
from disagg.page import RAW_TOKENS
from disagg.plan import Plan
from disagg.pool import Pool
from disagg.transfer.records import content_keys

MODEL = "computed here"  # no fingerprint: raw pages that were handed off have other keys


@dataclass(frozen=True)
class NewUnits:
    """Units of a prompt that a step completes, from the `first` on: a raw page for each."""

    sequence: Sequence
    first: int
    pages: Seq[int]


class ExactPrefixes:
    """What prompts of one engine share of their K and V. On the engine's thread."""

    def __init__(self, pool: Pool, arena: Tensor, shape: KVShape):
        layers = tuple(range(shape.num_layers))
        self._group = Raw().layer_group(layers, shape.heads, shape.head_dim, shape.dtype)
        self._plan = Plan((self._group,), (0,) * shape.num_layers)
        self._format = exact_format(self._group.raw)
        self._pool, self._arena = pool, arena
        self._new: list[NewUnits] = []

    def restore(self, sequence: Sequence, limit: int) -> int:
        """Fill a workspace with the leading tokens that are known, at most `limit`: how many."""
        sequence.keys = content_keys(MODEL, self._plan, sequence.request.tokens)[0]
        keys = sequence.keys[: limit // RAW_TOKENS]
        found = self._pool.take(keys)
        pages = [page for kept in found for page in kept.pages]
        try:
            if pages:
                self._read(sequence, pages, [x.note for x in found])
                self._pool.used(keys[: len(pages)])
        finally:
            self._pool.release(pages)
        sequence.kept_units = len(pages)
        return len(pages) * RAW_TOKENS

    def open(self, sequence: Sequence, done: int) -> NewUnits:
        """Pages for what a chunk up to token `done` completes; without room, now or later, none."""
        first = sequence.kept_units
        count = max(0, min(done // RAW_TOKENS, len(sequence.keys)) - first)
        try:
            pages = self._pool.claim(self._group.record(self._group.raw), count)
        except CapacityError:
            pages, sequence.keys = [], sequence.keys[:first]
        new = NewUnits(sequence, first, pages)
        self._new.append(new)
        return new

    def write(self, new: NewUnits, layer: int, k: Tensor, v: Tensor) -> None:
        """One layer of them: k, v [H, done, D] of all tokens so far."""
        if new.pages:
            first, end = (x * RAW_TOKENS for x in (new.first, new.first + len(new.pages)))
            ids = torch.tensor(new.pages, dtype=torch.int32, device=self._arena.device)
            target = Target(self._arena, ids, self._group.layer_offset(self._group.raw, layer))
            store_blocks(target, raw_blocks(k[:, first:end], v[:, first:end]))

    def close(self, whole: bool) -> None:
        """After a step: keep what was written in all layers; nothing if the step broke.

        The first units of a prompt go last when room is needed: without them the others are lost.
        """
        for new in self._new:
            sequence = new.sequence
            if whole and sequence.error is None:
                sequence.kept_units = new.first + len(new.pages)
                assert sequence.workspace is not None
                for unit, page in enumerate(new.pages, new.first):
                    squares = sequence.workspace.squares(unit)
                    self._pool.keep(sequence.keys[unit], [page], squares)
                self._pool.used(sequence.keys[: sequence.kept_units])
            self._pool.release(new.pages)
        self._new.clear()

    def _read(self, sequence: Sequence, pages: Seq[int], notes: Seq[object]) -> None:
        assert sequence.workspace is not None
        if squares := [note for note in notes if isinstance(note, Tensor)]:
            sequence.workspace.recall(squares)
        ids = torch.tensor([pages], dtype=torch.int32, device=self._arena.device)
        for layer in self._group.layers:
            base = self._group.layer_offset(self._group.raw, layer)
            k, v = gather_raw(self._arena, ids, self._format, base, self._group.heads)
            sequence.workspace.extend(layer, k[0], v[0], 0)
        wait_for_kernels(self._arena.device)  # before others may write to these pages
