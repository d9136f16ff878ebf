"""From shares to one forward pass: rows, chunks of prompts, and the step plans of layer groups.

Everything a step needs is allocated before anything changes; then the plans of all groups are made
of it before layer 0, and layers only follow them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from disagg.codecs.planning import codec_of
from disagg.engine.scheduler import ScheduledTokens
from disagg.errors import CapacityError
from disagg.kv.plan import LayerGroup
from disagg.kv.state import Allocator
from disagg.model.attention import Batch, Chunk, Decode
from disagg.paged.append import NewRecords, SequenceGrowth, take_records
from disagg.paged.page_tables import plan_step


@dataclass
class StepAllocation:
    """What decoding needs for one step, taken from the pool before anything changes.

    buckets: decoding sequences by layer group, and the fresh records of each
    loose:   what may be in nobody's state while the step runs: taken, or in a tail that it may seal
    """

    buckets: list[tuple[LayerGroup, list[SequenceGrowth], NewRecords]] = field(
        default_factory=list
    )
    loose: list[int] = field(default_factory=list)

    def lost(self, shares: Sequence[ScheduledTokens]) -> list[int]:
        """After a step that broke: what is in no state of its sequences, and not freed either."""
        states = [state for share in shares for state in share.sequence.groups]
        owned = {page for state in states for page in state.ids()}
        return [page for page in self.loose if page not in owned]


def take_stash(
    shares: Sequence[ScheduledTokens], allocator: Allocator
) -> StepAllocation:
    """All records that decoding shares need; CapacityError and nothing taken if no room.

    shares: the first ones of the step
    Pages that no window sees any more are released first.
    """
    stash, buckets = StepAllocation(), _buckets(shares)
    for group, growths in buckets:
        unseen = [
            x.state.drop(group.dropped(x.n) // group.page.tokens) for x in growths
        ]
        allocator.release([page for pages in unseen for page in pages])
    try:
        for group, growths in buckets:
            fresh = take_records(group, growths, allocator)
            stash.buckets.append((group, growths, fresh))
            stash.loose += fresh.ids()
    except CapacityError:
        allocator.release(stash.loose)
        raise
    for _, growths in buckets:
        stash.loose += [page for growth in growths for page in growth.state.tail]
    return stash


def build_batch(
    shares: Sequence[ScheduledTokens],
    stash: StepAllocation,
    arena: Tensor,
    make_chunk: Callable[[ScheduledTokens, int], Chunk],
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
    chunks = [
        make_chunk(x, row) for x, row in zip(shares, rows, strict=True) if not x.decodes
    ]
    decodes = []
    for group, growths, fresh in stash.buckets:
        codec = codec_of(group)
        step = plan_step(codec, group, growths, fresh, arena.device)
        decodes.append(Decode(codec, step, whole=len(step.rows) == len(tokens)))
    return Batch(tokens, positions, outputs, arena, tuple(chunks), tuple(decodes))


def _buckets(
    shares: Sequence[ScheduledTokens],
) -> list[tuple[LayerGroup, list[SequenceGrowth]]]:
    """Decoding shares by layer group; replayed blocks apart, so that nothing is padded to them."""
    found: dict[tuple[str, bool], tuple[LayerGroup, list[SequenceGrowth]]] = {}
    row = 0
    for share in shares:
        for group, state in zip(
            share.sequence.plan.groups, share.sequence.groups, strict=True
        ):
            key = (group.fingerprint, share.count > 1)
            growth = SequenceGrowth(state, share.sequence.n, share.count, row)
            found.setdefault(key, (group, []))[1].append(growth)
        row += share.count
    return list(found.values())
