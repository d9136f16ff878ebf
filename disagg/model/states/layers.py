"""The forward of a layer with a state, called once for each part of a packed row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from disagg.errors import ModelError
from disagg.kv.page import Layout
from disagg.model.states.cache import PartCache, StepCache
from disagg.model.states.layouts import continues_chunks, stateful_layers
from disagg.model.states.records import StateRecords
from disagg.model.states.step import PIECE_TOKENS, StatePart, StateRows

Rows = slice | Tensor  # tokens of one sequence; or single tokens: [B] int64
Output = tuple[Rows, Any]  # of a module for these rows: a tensor or a tuple of them


def split_states(model: PreTrainedModel, layouts: Sequence[Layout]) -> None:
    """Make layers with a state run once for each part of a row, where a `StepCache` says the parts.

    ModelError unless `layouts` are of the layers that keep a state.
    """
    layers = stateful_layers(model)
    if len(layers) != len(layouts):
        raise ModelError(
            f"{type(model).__name__} keeps {len(layers)} states, "
            f"{len(layouts)} by its config: not supported"
        )
    for index, modules in enumerate(layers):
        continues = continues_chunks(model, modules)
        for module in modules:
            split = SplitLayer(module.forward, index, layouts[index], continues)
            setattr(module, "forward", split)  # noqa: B010 (mypy: a method)


def continues_everywhere(model: nn.Module) -> bool:
    """Whether all layers that are split go on from a state with several tokens at once."""
    forwards = [module.forward for module in model.modules()]
    return all(x.continues for x in forwards if isinstance(x, SplitLayer))


@dataclass(frozen=True)
class SplitLayer:
    """The forward of a module with a state, called for each part of a row.

    index:     of the layer among those with a state
    continues: whether the module can go on from a state with several tokens at once
    """

    forward: Callable[..., Any]
    index: int
    layout: Layout
    continues: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = [x for x in (*args, *kwargs.values()) if isinstance(x, StepCache)]
        if not caches:
            return self.forward(*args, **kwargs)
        cache = caches[0]
        step = cache.step
        records = StateRecords(cache.arena, self.layout)
        call = LayerCall(self.forward, args, kwargs, cache)
        outputs = []
        for part in step.parts:
            outputs += self._run_part(part, records, call)
        if step.singles is not None:
            outputs.append(self._run_singles(step.singles, records, call))
        return joined(outputs, cache.tokens)

    def _run_part(
        self, part: StatePart, records: StateRecords, call: "LayerCall"
    ) -> list[Output]:
        """Several tokens of one sequence, whose states are changed where they are."""
        states = records.views(part.pages[self.index])
        first_row = part.row - part.before
        outputs = []
        for start, end in pairwise(self._cuts(part, records.arena)):
            cache = PartCache({} if start == 0 else states, records.planes)
            rows = slice(first_row + start, first_row + end)
            outputs.append(call.run(rows, cache))
            for name, state in cache.new_states.items():
                states[name].copy_(state)
        part.on_layer(self.index)
        return outputs

    def _cuts(self, part: StatePart, arena: Tensor) -> list[int]:
        """The tokens of a sequence between which it calls the module for a part, ends included.

        On a CPU calls end at fixed tokens, so that the numbers of a prompt do not depend on its
        chunks: a scan sums up in another order where it begins elsewhere. What a call computes
        also stays in the cache of the processor.
        """
        start, end = part.before, part.before + part.count
        if not self.continues:
            return [start, end] if part.fresh else [*range(start, end + 1)]
        if not arena.is_cpu:
            return [start, end]
        second = start - start % PIECE_TOKENS + PIECE_TOKENS
        return [start, *range(second, end, PIECE_TOKENS), end]

    def _run_singles(
        self, singles: StateRows, records: StateRecords, call: "LayerCall"
    ) -> Output:
        """One token of each of several sequences, as a batch."""
        pages = singles.pages[self.index]
        states = records.gather(pages)
        cache = PartCache(states, records.planes)
        output = call.run(singles.rows.long(), cache)
        records.scatter(pages, states | cache.new_states)
        return output


@dataclass(frozen=True)
class LayerCall:
    """A call of a module with a packed row, to be run for parts of the row."""

    forward: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    cache: StepCache

    def run(self, rows: Rows, cache: PartCache) -> Output:
        """Call it for some rows only, with the cache of these rows."""

        def selected(value: Any) -> Any:
            if value is self.cache:
                return cache
            if not self._is_row(value):
                return value
            if isinstance(rows, slice):
                return value[:, rows]
            # the batch of all rows needs no gathering
            batch = value if len(rows) == self.cache.tokens else value[:, rows]
            return batch.transpose(0, 1)

        args = map(selected, self.args)
        kwargs = {name: selected(value) for name, value in self.kwargs.items()}
        return rows, self.forward(*args, **kwargs)

    def _is_row(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape[:2] == (1, self.cache.tokens)


def joined(outputs: Sequence[Output], tokens: int) -> Any:
    """The outputs of all parts as one packed row [1, tokens, ...], or a tuple of rows."""
    _, first = outputs[0]
    if isinstance(first, tuple):
        columns = range(len(first))
        return tuple(
            joined([(rows, values[i]) for rows, values in outputs], tokens)
            for i in columns
        )
    if len(outputs) == 1:
        rows, _ = outputs[0]
        return first if isinstance(rows, slice) else first.transpose(0, 1)
    row = first.new_empty(1, tokens, *first.shape[2:])
    for rows, output in outputs:
        row[:, rows] = output if isinstance(rows, slice) else output.transpose(0, 1)
    return row
