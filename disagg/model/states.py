"""Layers that keep a state of fixed size instead of K and V, in one packed row of tokens.

    rows      │ chunk of A │ chunk of B │ c │ d │ e e e e │
    layer       forward(A)   forward(B)   [c, d]  forward(e), a replay
    states      where they are            gathered and scattered

State spaces, linear attention and short convolutions of transformers all ask the `Cache` for their
state, and give it the next one. Their forward is called once for each part of a row, with a cache
that answers for that part. Names no architecture: a layer shows what it keeps when it is called.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations import hub_kernels

from disagg.errors import ModelError
from disagg.kv.page import ARENA_UNIT, Layout, Plane, align, make_state_layout
from disagg.model.cache import PassThrough

CACHE_METHODS = {
    "get_conv_state",
    "update_conv_state",
    "get_recurrent_state",
    "update_recurrent_state",
}
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
WORDS = ARENA_UNIT // 8  # int64 words: states are gathered in units of the arena
LEAST_TRANSFORMERS = "5.24"  # the first whose Cache has these methods
TRIED = 5  # tokens of a chunk by which a layer shows what it does


# -- the parts of a row


@dataclass(frozen=True)
class StatePart:
    """Rows `row` .. `row + count - 1`: tokens of one sequence.

    pages:    of its records, one for each layer with a state
    fresh:    whether they are its first tokens: its records hold no state yet
    on_layer: called with the index of a layer that is done with them
    """

    row: int
    count: int
    pages: Sequence[int]
    fresh: bool
    on_layer: Callable[[int], None]


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


# -- caches


class StepCache(PassThrough):
    """The cache that a model gets: it brings the parts of the row to the layers.

    tokens: rows in all
    """

    def __init__(self, step: StateStep, arena: Tensor, tokens: int):
        super().__init__()
        self.step = step
        self.arena = arena
        self.tokens = tokens


class PartCache(PassThrough):
    """The states of one layer for one part of a row. A layer may also change them in place.

    states:     by the name of their plane; empty before the first token
    new_states: those that the layer has given
    planes:     their sizes, where these are known
    """

    def __init__(
        self, states: Mapping[str, Tensor], planes: Mapping[str, Plane] | None = None
    ):
        super().__init__()
        self.states = states
        self.new_states: dict[str, Tensor] = {}
        self._planes = planes or {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"recurrent{state_idx}")

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """The inputs that a convolution sees, of which the last ones are kept."""
        name = f"conv{state_idx}"
        size = conv_kernel_size or conv_states.shape[-1]
        if name in self._planes:
            size = self._planes[name].shape[-1]
        before = self.states.get(name)
        if before is None:
            missing = max(0, size - conv_states.shape[-1])
            inputs = nn.functional.pad(conv_states, (missing, 0))
        else:
            inputs = torch.cat([before, conv_states], -1)
        self.new_states[name] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.new_states[f"recurrent{state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


# -- records


@dataclass(frozen=True)
class StateRecords:
    """The records of one layer in an arena."""

    arena: Tensor
    layout: Layout

    @cached_property
    def planes(self) -> dict[str, Plane]:
        return {plane.name: plane for plane in self.layout.planes}

    def views(self, page: int) -> dict[str, Tensor]:
        """The states of one sequence where they are: [1, ...]."""
        views = {}
        for name, plane in self.planes.items():
            start = page * ARENA_UNIT + plane.offset
            plane_bytes = self.arena[start : start + plane.nbytes]
            states = plane_bytes.view(_dtype_of(plane))
            views[name] = states.view(1, *plane.shape)
        return views

    def gather(self, pages: Tensor) -> dict[str, Tensor]:
        """Copies of the states of several sequences: [B, ...]."""
        states = {}
        for name, plane in self.planes.items():
            places = self._places(pages, plane)
            words = self._units.index_select(0, places.flatten())
            items = words.view(_dtype_of(plane)).view(len(pages), -1)
            num_items = plane.nbytes // items.element_size()
            states[name] = items[:, :num_items].reshape(len(pages), *plane.shape)
        return states

    def scatter(self, pages: Tensor, states: Mapping[str, Tensor]) -> None:
        """Copy the states of several sequences to their records."""
        for name, state in states.items():
            plane = self.planes[name]
            places = self._places(pages, plane)
            items = state.to(_dtype_of(plane)).reshape(len(pages), -1)
            room = places.shape[1] * ARENA_UNIT // items.element_size()
            items = nn.functional.pad(items, (0, room - items.shape[1]))
            words = items.contiguous().view(torch.int64).view(-1, WORDS)
            self._units.index_copy_(0, places.flatten(), words)

    @cached_property
    def _units(self) -> Tensor:
        return self.arena.view(torch.int64).view(-1, WORDS)

    def _places(self, pages: Tensor, plane: Plane) -> Tensor:
        """The units of a plane: [B, units] int64."""
        first = plane.offset // ARENA_UNIT
        last = first + align(plane.nbytes, ARENA_UNIT) // ARENA_UNIT
        units = torch.arange(first, last, device=pages.device)
        return pages.long()[:, None] + units


def _dtype_of(plane: Plane) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, plane.dtype)
    return dtype


# -- layers


def stateful_layers(model: nn.Module) -> list[list[nn.Module]]:
    """The modules that ask the cache for a state, by layer."""
    layers: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if not CACHE_METHODS.isdisjoint(_names_in(type(module))):
            index: Any = module.layer_idx
            layers.setdefault(int(index), []).append(module)
    return [layers[index] for index in sorted(layers)]


def _names_in(kind: type) -> Iterator[str]:
    """The names that the methods of a class use."""
    for owner in kind.__mro__:
        for member in vars(owner).values():
            code = getattr(inspect.unwrap(member), "__code__", None)
            if callable(member) and code is not None:
                yield from code.co_names


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
    ) -> list["Output"]:
        """Several tokens of one sequence, whose states are changed where they are."""
        states = records.views(part.pages[self.index])
        width = part.count if self.continues or part.fresh else 1
        outputs = []
        for row in range(part.row, part.row + part.count, width):
            cache = PartCache({} if part.fresh else states, records.planes)
            rows = slice(row, row + width)
            outputs.append(call.run(rows, cache))
            for name, state in cache.new_states.items():
                states[name].copy_(state)
        part.on_layer(self.index)
        return outputs

    def _run_singles(
        self, singles: StateRows, records: StateRecords, call: "LayerCall"
    ) -> "Output":
        """One token of each of several sequences, as a batch."""
        pages = singles.pages[self.index]
        states = records.gather(pages)
        cache = PartCache(states, records.planes)
        output = call.run(singles.rows.long(), cache)
        records.scatter(pages, states | cache.new_states)
        return output


Rows = slice | Tensor  # tokens of one sequence; or single tokens: [B] int64
Output = tuple[Rows, Any]  # of a module for these rows: a tensor or a tuple of them


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


# -- what layers keep


def describe_states(path: Path, dtype: str) -> tuple[Layout, ...]:
    """What each layer with a state keeps, of a model's config alone: no weight is read.

    ModelError where transformers is too old for states, or cannot build the model.
    """
    if not hasattr(Cache, "get_conv_state"):
        raise ModelError(
            f"layers with a state need transformers {LEAST_TRANSFORMERS} or later; "
            f"this is {transformers.__version__}"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config.get_text_config(), dtype=getattr(torch, dtype)
            )
    except Exception as error:  # its checks of a config raise anything
        raise ModelError(f"transformers cannot build {path}: {error}") from error
    with torch.inference_mode(), plain_torch():
        return measure_states(model)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Layers computed by torch alone: kernels of other packages take no meta tensors.

    transformers uses them where they are installed, except while it exports a model (5.24).
    """
    is_exporting = hub_kernels.is_torchdynamo_exporting
    hub_kernels.is_torchdynamo_exporting = lambda: True
    try:
        yield
    finally:
        hub_kernels.is_torchdynamo_exporting = is_exporting


def measure_states(model: PreTrainedModel) -> tuple[Layout, ...]:
    """What each layer with a state keeps of a sequence, on whichever device; also on "meta".

    ModelError for a layer that cannot be called on its own.
    """
    layouts = []
    for modules in stateful_layers(model):
        cache = PartCache({})
        for module in modules:
            _call(module, _hidden(model, TRIED), cache)
        planes = []
        for name, state in sorted(cache.new_states.items()):
            dtype = str(state.dtype).removeprefix("torch.")
            planes.append((name, dtype, tuple(state.shape[1:])))
        layouts.append(make_state_layout(planes))
    return tuple(layouts)


def continues_chunks(model: PreTrainedModel, modules: Sequence[nn.Module]) -> bool:
    """Whether several tokens at once go on from the state of these modules.

    The scan of Mamba 1 begins with zeros whatever the state (transformers 5.24): another state
    gives the same output, bit for bit.
    """
    source = torch.Generator().manual_seed(0)
    hidden = _hidden(model, TRIED).cpu()
    hidden = hidden.normal_(generator=source).to(model.device)
    for module in modules:
        cache = PartCache({})
        with torch.inference_mode():
            _call(module, hidden, cache)
            other_states = {
                name: state + 1.0 if name.startswith("recurrent") else state
                for name, state in cache.new_states.items()
            }
            outputs = _call(module, hidden, PartCache(dict(cache.new_states)))
            other_outputs = _call(module, hidden, PartCache(other_states))
        is_recurrent = any(name.startswith("recurrent") for name in other_states)
        if is_recurrent and all(map(torch.equal, outputs, other_outputs)):
            return False
    return True


def _hidden(model: PreTrainedModel, tokens: int) -> Tensor:
    size = model.config.get_text_config().hidden_size
    return torch.zeros(1, tokens, size, dtype=model.dtype, device=model.device)


def _call(module: nn.Module, hidden: Tensor, cache: Cache) -> tuple[Tensor, ...]:
    """The outputs of a module with a state, called on its own."""
    name = type(module).__name__
    parameters = inspect.signature(type(module).forward).parameters
    arguments = [x for x in CACHE_ARGUMENTS if x in parameters]
    if not arguments:
        raise ModelError(f"{name} keeps a state and takes no cache: not supported")
    try:
        output = module(hidden, **{arguments[0]: cache})
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(
            f"{name} does not run alone ({reason}): not supported"
        ) from error
    return output if isinstance(output, tuple) else (output,)


# -- records apart from a pool


def scratch_bytes(layouts: Sequence[Layout]) -> int:
    """Bytes of a record that can stand for one of any layer."""
    return max((layout.block_bytes for layout in layouts), default=0)


def record_pages(layouts: Sequence[Layout], first: int = 0) -> list[int]:
    """Pages of one record for each layer, side by side, and the page behind them."""
    units = [layout.block_bytes // ARENA_UNIT for layout in layouts]
    return list(accumulate(units, initial=first))
