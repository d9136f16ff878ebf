"""What one forward pass does in layers with a state: the parts of its row, and their records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# on a CPU a layer is called with no more tokens of a part, which end at multiples of it
PIECE_TOKENS = 256


@dataclass(frozen=True)
class StatePart:
    """Rows `row` .. `row + count - 1`: tokens `before` .. of one sequence.

    pages:    of its records, one for each layer with a state
    on_layer: called with the index of a layer that is done with them
    """

    row: int
    count: int
    before: int
    pages: Sequence[int]
    on_layer: Callable[[int], None]

    @property
    def fresh(self) -> bool:
        """Whether they are its first tokens: its records hold no state yet."""
        return self.before == 0


@dataclass(frozen=True)
class StateRows:
    """Single tokens of several sequences, in the order of their rows.

    rows:  [B] int32
    pages: [layers, B] int32 - their records
    """

    rows: Tensor
    pages: Tensor

    @classmethod
    def of(cls, rows: Sequence[int], pages: Sequence[Sequence[int]]) -> "StateRows":
        """Rows and the records of each, on the host."""
        by_layer = torch.tensor(pages, dtype=torch.int32).T.contiguous()
        return cls(torch.tensor(rows, dtype=torch.int32), by_layer)

    def select(self, rows: Sequence[int]) -> "StateRows":
        """Some of these rows, as all rows of another step."""
        places = {row: place for place, row in enumerate(self.rows.tolist())}
        columns = [places[row] for row in rows]
        own_rows = torch.arange(len(rows), dtype=torch.int32)
        return StateRows(own_rows, self.pages[:, columns])


@dataclass(frozen=True)
class StateStep:
    """What one forward pass does in layers with a state.

    singles: rows that are single tokens; None: there are none
    scratch: page of a record that no sequence owns
    """

    parts: tuple[StatePart, ...] = ()
    singles: StateRows | None = None
    scratch: int = 0

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Its int32 tensors, to be copied to the device with those of the step."""
        if self.singles is None:
            return ()
        return self.singles.rows, self.singles.pages

    def select(self, rows: Sequence[int]) -> "StateStep":
        """Single tokens of some rows, as all rows of another step."""
        if self.singles is None:
            return self
        return replace(self, singles=self.singles.select(rows))

    def padded(self, count: int, dry: bool) -> "StateStep":
        """`count` rows, of which the added ones use the scratch record; dry: all rows do."""
        if self.singles is None:
            return self
        pages = self.singles.pages
        padded = pages.new_full((len(pages), count), self.scratch)
        if not dry:
            padded[:, : pages.shape[1]] = pages
        rows = torch.arange(count, dtype=torch.int32)
        return replace(self, singles=StateRows(rows, padded))

    def with_tables(self, tables: tuple[Tensor, ...]) -> "StateStep":
        """The same over other tensors, of the device."""
        singles = StateRows(*tables) if tables else None
        return replace(self, singles=singles)


NO_STATES = StateStep()
