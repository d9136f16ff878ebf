"""What prompts can share, and its name: content keys of the units of a prompt.

Equal keys mean equal bytes: KV depends on the model, the layouts and every token before, and so do
the keys. Hashes and arithmetic only; who keeps what under a key is the pool's.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from disagg.kv.page import RAW_TOKENS, FinalAt, Item, Kind
from disagg.kv.plan import LayerGroup, Plan

KEY_BYTES = 16


@dataclass(frozen=True)
class PrefixBlock:
    """Tokens of one layer group, from those of the unit before up to `end`, by what holds them.

    What becomes final together is shared whole: a page, a segment with its pages, or a sink.
    parts: the records by kind, those that others depend on first
    """

    group: int
    end: int
    parts: dict[Kind, range]

    def records(self) -> list[tuple[Kind, int]]:
        """The records, in that order."""
        return [
            (kind, record) for kind, records in self.parts.items() for record in records
        ]

    def items(self, group: LayerGroup) -> list[Item]:
        """The items of all layers of the group."""
        return [
            Item(kind, self.group, layer, record)
            for layer in group.layers
            for kind, record in self.records()
        ]


def units_of(plan: Plan, tokens: int) -> tuple[tuple[PrefixBlock, ...], ...]:
    """The units of a prompt of `tokens` tokens: for each layer group, in token order.

    A group has none if its records are final only with the whole prompt: those may be written to
    while decoding, and what is shared never is.
    """
    return tuple(
        tuple(_units(index, group, tokens)) for index, group in enumerate(plan.groups)
    )


def content_keys(
    model: str, plan: Plan, prompt: Sequence[int]
) -> tuple[tuple[bytes, ...], ...]:
    """The key of every unit of a prompt, by layer group: equal keys mean the same content.

    KV depends on model, layouts and every token before, and on nothing else; so do the keys. Pages
    may depend on the lead of the prompt too, behind them or not.

    model: fingerprint of config and weights · prompt: token ids
    """
    tokens = array("q", prompt)
    if sys.byteorder == "big":
        tokens.byteswap()
    view, size = memoryview(tokens).cast("B"), tokens.itemsize
    found = []
    for group, units in zip(plan.groups, units_of(plan, len(prompt)), strict=True):
        chain = blake2b(
            repr((model, group.fingerprint)).encode(), digest_size=KEY_BYTES
        )
        keys, known = [], 0
        for unit in units:
            end = max(
                unit.end, min(group.lead, len(prompt)) if Kind.PAGE in unit.parts else 0
            )
            chain.update(view[known * size : end * size])
            chain.update(b"%d" % unit.end if group.lead else b"")
            keys.append(chain.digest())
            known = max(known, end)
        found.append(tuple(keys))
    return tuple(found)


def _units(index: int, group: LayerGroup, tokens: int) -> Iterator[PrefixBlock]:
    sink, sealed = (
        group.sink,
        0 if group.final_at is FinalAt.PROMPT else group.sealed(tokens),
    )
    dropped = min(sealed, group.dropped(tokens))
    if sink and tokens >= sink:
        yield PrefixBlock(index, sink, {Kind.RAW: range(sink // RAW_TOKENS)})
    for first in range(0, sealed - dropped, group.step):
        end = min(first + group.step, sealed - dropped)
        parts = {Kind.PAGE: range(first // group.page.tokens, end // group.page.tokens)}
        if group.segment:
            segments = range(
                first // group.segment_tokens, -(-end // group.segment_tokens)
            )
            parts = {Kind.SEGMENT: segments} | parts
        yield PrefixBlock(index, sink + dropped + end, parts)
