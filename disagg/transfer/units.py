"""What can be shared between prompts: units of records, and the keys of their content.

A unit is what becomes final together, so it is shared whole: a page; or a segment with its pages;
or all sealed tokens of a prompt. Its key stands for the model, the layouts of its layer group and
every token up to its end, since KV depends on all of them and on nothing else. Arithmetic and
hashes only: sender and receiver derive the same units, the keys come from whoever has the tokens.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from disagg.page import SEGMENT_TOKENS, FinalAt, Kind
from disagg.plan import LayerGroup, Plan
from disagg.wire import Item

KEY_BYTES = 16


@dataclass(frozen=True)
class Unit:
    """Tokens `first` .. `end - 1` of one layer group, by the records that hold them."""

    group: int
    first: int
    end: int
    pages: range
    segments: range

    def records(self) -> list[tuple[Kind, int]]:
        """The records, those that others depend on first."""
        return [(Kind.SEGMENT, x) for x in self.segments] + [(Kind.PAGE, x) for x in self.pages]

    def items(self, group: LayerGroup) -> list[Item]:
        """The items of all layers of the group."""
        return [
            Item(kind, self.group, layer, record)
            for layer in group.layers
            for kind, record in self.records()
        ]

    def ids(self, ids: Mapping[Kind, Sequence[int]]) -> list[int]:
        """The page ids of the records, in their order, from those of a whole sequence."""
        return [ids[kind][record] for kind, record in self.records()]


def units_of(plan: Plan, tokens: int) -> tuple[tuple[Unit, ...], ...]:
    """The units of a prompt of `tokens` tokens: for each layer group, in token order."""
    return tuple(tuple(_units(index, group, tokens)) for index, group in enumerate(plan.groups))


def content_keys(model: str, plan: Plan, prompt: Sequence[int]) -> tuple[bytes, ...]:
    """The key of every unit of a prompt, group by group: equal keys mean the same content.

    model: fingerprint of config and weights · prompt: token ids
    """
    tokens = array("q", prompt)
    if sys.byteorder == "big":
        tokens.byteswap()
    view, size = memoryview(tokens).cast("B"), tokens.itemsize
    keys = []
    for index, units in enumerate(units_of(plan, len(prompt))):
        identity = repr((model, plan.groups[index].fingerprint)).encode()
        chain = blake2b(identity, digest_size=KEY_BYTES)
        for unit in units:
            chain.update(view[unit.first * size : unit.end * size])
            keys.append(chain.digest())
    return tuple(keys)


def _units(index: int, group: LayerGroup, tokens: int) -> list[Unit]:
    sealed, inventory = group.sealed(tokens), group.inventory(tokens)
    if group.final_at is FinalAt.PROMPT:
        pages, segments = range(inventory.pages), range(inventory.segments)
        return [Unit(index, 0, sealed, pages, segments)] if sealed else []
    if group.final_at is FinalAt.SEGMENT or group.segment is not None:
        step = SEGMENT_TOKENS
    else:
        step = group.page.tokens
    found = []
    for first in range(0, sealed, step):
        end = min(first + step, sealed)
        pages = range(first // group.page.tokens, end // group.page.tokens)
        segments = range(first // SEGMENT_TOKENS, -(-end // SEGMENT_TOKENS))
        found.append(Unit(index, first, end, pages, segments if group.segment else range(0)))
    return found
