"""Content keys: names for the parts of a prompt that prompts can share.

Equal keys mean equal bytes: KV depends on the model, the layouts and every token before, and so do
the keys. Hashes and arithmetic only; the pool keeps pages under these keys.
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
    """Tokens of one layer group that become final together, and so are shared whole: a page, a
    segment with its pages, or a sink.

    end:   the tokens are those from the end of the block before, up to this one
    parts: its records by kind, those that others depend on first
    """

    group: int
    end: int
    parts: dict[Kind, range]

    def records(self) -> list[tuple[Kind, int]]:
        """The records, in the order of `parts`."""
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


def joined(blocks: Sequence[PrefixBlock]) -> PrefixBlock:
    """Consecutive blocks of a layer group as one: few long ranges instead of many short ones."""
    parts: dict[Kind, range] = {}
    for block in blocks:
        for kind, records in block.parts.items():
            start = parts[kind].start if kind in parts else records.start
            parts[kind] = range(start, records.stop)
    return PrefixBlock(blocks[0].group, blocks[-1].end, parts)


def prefix_blocks(plan: Plan, tokens: int) -> tuple[tuple[PrefixBlock, ...], ...]:
    """The blocks of a prompt of `tokens` tokens: for each layer group, in token order.

    A group has none if its records are final only with the whole prompt: those may be written to
    while decoding, and shared records never are.
    """
    groups = enumerate(plan.groups)
    return tuple(tuple(_blocks(index, group, tokens)) for index, group in groups)


def content_keys(
    model: str, plan: Plan, prompt: Sequence[int], is_long: bool = False
) -> tuple[tuple[bytes, ...], ...]:
    """The key of every block of a prompt, by layer group: equal keys mean the same content.

    model: fingerprint of config and weights · prompt: token ids
    is_long: `plan.is_long` of the text that the prompt begins
    """
    if is_long:
        model = f"{model}, long texts"
    tokens = array("q", prompt)
    if sys.byteorder == "big":
        tokens.byteswap()
    blocks = prefix_blocks(plan, len(prompt))
    return tuple(
        tuple(_group_keys(model, group, tokens, blocks_of_group))
        for group, blocks_of_group in zip(plan.groups, blocks, strict=True)
    )


def _group_keys(
    model: str,
    group: LayerGroup,
    tokens: "array[int]",
    blocks: Sequence[PrefixBlock],
) -> Iterator[bytes]:
    """A chain of hashes: each key covers the model, the group and every token up to its block.

    All pages of a group may depend on the lead of the prompt, so their keys cover that too, even
    where it ends after them.
    """
    view, size = memoryview(tokens).cast("B"), tokens.itemsize
    lead = min(group.lead, len(tokens))
    identity = repr((model, group.fingerprint)).encode()
    chain = blake2b(identity, digest_size=KEY_BYTES)
    hashed = 0  # tokens in the chain
    for block in blocks:
        end = max(block.end, lead) if Kind.PAGE in block.parts else block.end
        chain.update(view[hashed * size : end * size])
        if group.lead:
            chain.update(b"%d" % block.end)
        hashed = max(hashed, end)
        yield chain.digest()


def _blocks(index: int, group: LayerGroup, tokens: int) -> Iterator[PrefixBlock]:
    sink = group.sink
    sealed = 0 if group.final_at is FinalAt.PROMPT else group.sealed(tokens)
    dropped = min(sealed, group.dropped(tokens))
    if sink and tokens >= sink:
        yield PrefixBlock(index, sink, {Kind.RAW: range(sink // RAW_TOKENS)})
    step = group.step
    for first in range(0, sealed - dropped, step):
        end = min(first + step, sealed - dropped)
        parts: dict[Kind, range] = {}
        if group.segment:
            last_segment = -(-end // group.segment_tokens)
            parts[Kind.SEGMENT] = range(first // group.segment_tokens, last_segment)
        parts[Kind.PAGE] = range(first // group.page.tokens, end // group.page.tokens)
        yield PrefixBlock(index, sink + dropped + end, parts)
