"""From scheduled tokens to one forward pass: rows, chunks of prompts, step plans of layer groups.

All records of a step are allocated before any state changes. The plans of all groups are made
before layer 0; layers only follow them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from disagg.codecs.planning import codec_of
from disagg.engine.scheduler import ScheduledTokens
from disagg.errors import CapacityError
from disagg.kv.plan import LayerGroup
from disagg.kv.state import Allocator
from disagg.model.attention import Batch, Chunk, Decode
from disagg.model.states.step import NO_STATES, StatePart, StateRows, StateStep
from disagg.paged.append import NewRecords, SequenceGrowth, take_records
from disagg.paged.page_tables import plan_step


@dataclass
class StepAllocation:
    """The records that decoding needs for one step, allocated before any state changes.

    buckets: decoding sequences by layer group, and the new records of each group
    loose:   pages that may be in no state while the step runs: the new ones, and those of tails,
             which the step may seal
    """

    buckets: list[tuple[LayerGroup, list[SequenceGrowth], NewRecords]] = field(
        default_factory=list
    )
    loose: list[int] = field(default_factory=list)

    def lost(self, scheduled: Sequence[ScheduledTokens]) -> list[int]:
        """After a broken step: pages in no state of its sequences, and not freed either."""
        states = [state for entry in scheduled for state in entry.sequence.groups]
        owned = {page for state in states for page in state.ids()}
        return [page for page in self.loose if page not in owned]


def allocate_step(
    scheduled: Sequence[ScheduledTokens], allocator: Allocator
) -> StepAllocation:
    """All records that decoding needs; CapacityError and nothing allocated if there is no room.

    scheduled: the decoding sequences of the step, which have its first rows
    Pages that no window sees any more are released first.
    """
    allocation = StepAllocation()
    buckets = _buckets(scheduled)
    for group, growths in buckets:
        unseen: list[int] = []
        for growth in growths:
            unseen += growth.state.drop(group.dropped_pages(growth.n))
        allocator.release(unseen)
    try:
        for group, growths in buckets:
            records = take_records(group, growths, allocator)
            allocation.buckets.append((group, growths, records))
            allocation.loose += records.ids()
    except CapacityError:
        allocator.release(allocation.loose)
        raise
    for _, growths in buckets:
        for growth in growths:
            allocation.loose += growth.state.tail
    return allocation


def build_batch(
    scheduled: Sequence[ScheduledTokens],
    allocation: StepAllocation,
    arena: Tensor,
    make_chunk: Callable[[ScheduledTokens, int], Chunk],
    states: StateStep = NO_STATES,
) -> Batch:
    """One forward pass over the scheduled tokens, in their order.

    make_chunk: the chunk of a prompt, from its scheduled tokens and its first row
    states:     what the pass does in layers with a state
    """
    tokens: list[int] = []
    positions: list[int] = []
    outputs: list[int] = []
    long_rows: list[bool] = []
    chunks: list[Chunk] = []
    for entry in scheduled:
        if not entry.decodes:
            chunks.append(make_chunk(entry, len(tokens)))
        n = entry.sequence.n
        tokens += entry.tokens
        positions += range(n, n + entry.count)
        long_rows += [entry.sequence.is_long] * entry.count
        outputs += range(len(tokens) - entry.outputs, len(tokens))
    decodes = []
    for group, growths, records in allocation.buckets:
        codec = codec_of(group)
        step = plan_step(codec, group, growths, records, arena.device)
        decodes.append(Decode(codec, step, whole=len(step.rows) == len(tokens)))
    return Batch(
        tokens=tokens,
        positions=positions,
        outputs=outputs,
        arena=arena,
        chunks=tuple(chunks),
        decodes=tuple(decodes),
        states=states,
        long_rows=long_rows,
    )


def plan_states(
    scheduled: Sequence[ScheduledTokens],
    scratch: int,
    cuts: Callable[[ScheduledTokens], Iterable[int]],
    on_layer: Callable[[ScheduledTokens, int, int], None],
) -> StateStep:
    """What one forward pass does in layers with a state; nothing where a model has none.

    scratch:  page of a record that no sequence owns
    cuts:     the tokens of a sequence behind which these layers stop, the last of them included
    on_layer: called with the tokens of a sequence behind which a layer has stopped, and the
              index of the layer
    """
    parts: list[StatePart] = []
    rows: list[int] = []
    pages_of_rows: list[list[int]] = []
    row = 0
    for entry in scheduled:
        pages = entry.sequence.state_pages
        if not pages:
            return NO_STATES
        if entry.decodes and entry.count == 1:
            rows.append(row)
            pages_of_rows.append(pages)
        else:
            start = entry.sequence.n
            for end in cuts(entry):
                part = StatePart(
                    row=row + start - entry.sequence.n,
                    count=end - start,
                    before=start,
                    pages=pages,
                    on_layer=partial(on_layer, entry, end),
                )
                parts.append(part)
                start = end
        row += entry.count
    if not rows:
        return StateStep(tuple(parts), scratch=scratch)
    return StateStep(tuple(parts), StateRows.of(rows, pages_of_rows), scratch)


def _buckets(
    scheduled: Sequence[ScheduledTokens],
) -> list[tuple[LayerGroup, list[SequenceGrowth]]]:
    """Decoding sequences by layer group; blocks of several tokens apart, so that none is padded."""
    buckets: dict[tuple[str, bool], tuple[LayerGroup, list[SequenceGrowth]]] = {}
    row = 0
    for entry in scheduled:
        sequence = entry.sequence
        is_block = entry.count > 1
        # states have no tails: they come behind these groups
        for group, state in zip(sequence.plan.paged, sequence.groups, strict=False):
            _, growths = buckets.setdefault((group.fingerprint, is_block), (group, []))
            growths.append(SequenceGrowth(state, sequence.n, entry.count, row))
        row += entry.count
    return list(buckets.values())
