"""Which layers of a model keep a state, what it consists of, and whether chunks go on from it."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations import hub_kernels

from disagg.errors import ModelError
from disagg.kv.page import Layout, make_state_layout
from disagg.model.architecture import building, language_model, read_architecture
from disagg.model.states.cache import PartCache

CACHE_METHODS = {
    "get_conv_state",
    "update_conv_state",
    "get_recurrent_state",
    "update_recurrent_state",
}
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
LEAST_TRANSFORMERS = "5.24"  # the first whose Cache has these methods
TRIED = 5  # tokens of a chunk by which a layer shows what it does


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


def describe_states(path: Path, dtype: str) -> tuple[Layout, ...]:
    """What each layer with a state keeps, of a model's config alone: no weight is read.

    ModelError where transformers is too old for states, or cannot build the model.
    """
    if not hasattr(Cache, "get_conv_state"):
        raise ModelError(
            f"layers with a state need transformers {LEAST_TRANSFORMERS} or later; "
            f"this is {transformers.__version__}"
        )
    kind, config = language_model(read_architecture(path))
    try:
        with building(), torch.device("meta"):
            model = kind._from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:  # layers check their sizes only when they are made
        reason = " ".join(str(error).split())
        raise ModelError(
            f"transformers cannot build a model from {path / 'config.json'}: {reason}"
        ) from error
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
