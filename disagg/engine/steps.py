"""From shares to one forward pass: rows, chunks of prompts, and the step plans of layer groups.

Everything a step needs is allocated before anything changes; then the plans of all groups are made
before layer 0, and layers only follow them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from disagg.codecs.planning import codec_of
from disagg.codecs.seals import Growth, take_records
from disagg.codecs.tables import plan_step
from disagg.engine.scheduler import Share
from disagg.errors import CapacityError
from disagg.model.attention import Batch, Chunk, Decode
from disagg.plan import LayerGroup, RecordShape
from disagg.state import Allocator


@dataclass
class Stash:
    """Records taken from the pool for one step: the allocator that its plans are made with.

    loose: what may be in nobody's state while the step runs: taken, or in a tail that it may seal
    """

    pages: dict[RecordShape, list[int]] = field(default_factory=dict)
    loose: list[int] = field(default_factory=list)

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` of the pages taken; they were counted before."""
        kept = self.pages.get(shape, [])
        assert len(kept) >= count, f"the step counted {len(kept)} records, its plan wants {count}"
        taken, self.pages[shape] = kept[:count], kept[count:]
        return taken

    def release(self, pages: Sequence[int]) -> None:
        raise AssertionError("a counted step has nothing to give back")

    def lost(self, shares: Sequence[Share]) -> list[int]:
        """After a step that broke: what is in no state of its sequences, and not freed either."""
        states = [state for share in shares for state in share.sequence.groups]
        owned = {page for state in states for page in state.ids()}
        return [page for page in self.loose if page not in owned]


@dataclass
class Tally:
    """An allocator that only counts what is asked of it."""

    wanted: dict[RecordShape, int] = field(default_factory=dict)

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """Count `count` records; the ids mean nothing."""
        self.wanted[shape] = self.wanted.get(shape, 0) + count
        return [0] * count

    def release(self, pages: Sequence[int]) -> None:
        raise AssertionError("counting takes nothing, so there is nothing to give back")


def take_stash(shares: Sequence[Share], allocator: Allocator) -> Stash:
    """All records that decoding shares need; CapacityError and nothing taken if no room.

    Pages that no window sees any more are released first.
    """
    tally, stash = Tally(), Stash()
    for group, growths in _buckets(shares, [0] * len(shares)):
        for growth in growths:
            unseen = group.dropped(growth.n) // group.page.tokens
            allocator.release(growth.state.drop(unseen))
        take_records(group, growths, tally)
    try:
        for shape, count in tally.wanted.items():
            stash.pages[shape] = allocator.allocate(shape, count)
    except CapacityError:
        for pages in stash.pages.values():
            allocator.release(pages)
        raise
    states = [state for x in shares if x.decodes for state in x.sequence.groups]
    stash.loose = [
        page for pages in (*stash.pages.values(), *(x.tail for x in states)) for page in pages
    ]
    return stash


def build_batch(
    shares: Sequence[Share], stash: Stash, arena: Tensor, make_chunk: Callable[[Share, int], Chunk]
) -> Batch:
    """One forward pass over the shares, in their order.

    make_chunk: the chunk of a prompt, from its share and its first row
    """
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    outputs: list[int] = []
    for share in shares:
        n = share.sequence.n
        rows.append(len(tokens))
        tokens += share.sequence.pending(share.count)
        positions += range(n, n + share.count)
        outputs += range(len(tokens) - share.outputs, len(tokens))
    chunks = [make_chunk(x, row) for x, row in zip(shares, rows, strict=True) if not x.decodes]
    decodes = [
        Decode(
            codec_of(group),
            plan_step(group, growths, stash, arena.device),
            whole=sum(growth.m for growth in growths) == len(tokens),
        )
        for group, growths in _buckets(shares, rows)
    ]
    return Batch(
        tokens=tokens,
        positions=positions,
        outputs=outputs,
        arena=arena,
        chunks=tuple(chunks),
        decodes=tuple(decodes),
    )


def _buckets(shares: Sequence[Share], rows: Sequence[int]) -> list[tuple[LayerGroup, list[Growth]]]:
    """Decoding shares by layer group; replayed blocks apart, so that nothing is padded to them."""
    found: dict[tuple[str, bool], tuple[LayerGroup, list[Growth]]] = {}
    for share, row in zip(shares, rows, strict=True):
        if not share.decodes:
            continue
        for group, state in zip(share.sequence.plan.groups, share.sequence.groups, strict=True):
            key = (group.fingerprint, share.count > 1)
            growth = Growth(state, share.sequence.n, share.count, row)
            found.setdefault(key, (group, []))[1].append(growth)
    return list(found.values())
