"""The states of a sequence at its hand-off: rounded once, when its prompt is computed.

    prefill   last chunk ─► side record ─ narrow ─► wire record ─► sent; the side record is freed
    decode    wire record ─ widen ─► side record, which steps change; the wire record is freed

A prompt that is computed where it decodes takes both steps too. So an answer does not depend on
where its prompt was computed, and is the same again when it is computed again.
"""

from collections.abc import Iterator

from torch import Tensor

from disagg.engine.sequence import Sequence
from disagg.kv.page import Kind
from disagg.kv.plan import StateGroup
from disagg.kv.state import GroupState
from disagg.model.states.records import StateRecords
from disagg.model.states.wire_form import narrow, widen


def narrow_state(group: StateGroup, state: GroupState, arena: Tensor) -> Kind:
    """Write the record that is handed off, of a state that is final; its kind."""
    if state.wire is not None:
        assert state.side is not None
        exact = StateRecords(arena, group.page)
        narrow(exact, state.side, StateRecords(arena, group.sent), state.wire)
    return group.sent.kind


def widen_states(sequence: Sequence, arena: Tensor) -> list[int]:
    """Make the states of a prompt those that steps change; returns the pages to release."""
    pages = []
    for group, state in _rounded(sequence):
        assert state.wire is not None
        assert state.side is not None
        exact = StateRecords(arena, group.page)
        widen(StateRecords(arena, group.sent), state.wire, exact, state.side)
        pages.append(state.wire)
    for _, state in _rounded(sequence):
        state.wire = None
    return pages


def drop_exact_states(sequence: Sequence) -> list[int]:
    """Keep the wire records alone; returns the pages to release."""
    pages = []
    for _, state in _rounded(sequence):
        assert state.side is not None
        pages.append(state.side)
        state.side = None
    return pages


def _rounded(sequence: Sequence) -> Iterator[tuple[StateGroup, GroupState]]:
    """The states that have a wire record."""
    plan = sequence.plan
    states = sequence.groups[len(plan.paged) :]
    for group, state in zip(plan.states, states, strict=True):
        if state.wire is not None:
            yield group, state
