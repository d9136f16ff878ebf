"""The forward pass of a loaded model: our own, or the module of transformers."""

import inspect

from torch import Tensor, nn
from transformers import PreTrainedModel

from disagg.model.attention import Attention
from disagg.model.cache import cache_name
from disagg.model.linear import has_room, linear_layers, pack_linears
from disagg.model.llama import LlamaForward, is_llama_like, llama_forward
from disagg.model.quantized_linear import quantize_linears
from disagg.model.states.cache import StepCache


class ModuleForward(nn.Module):
    """The forward pass of a module of transformers."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self._cache_name = cache_name(model)
        parameters = inspect.signature(model.forward).parameters
        self._selects_rows = "logits_to_keep" in parameters

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attention,
        cache: StepCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The logits of a packed row of N tokens: [N, V], or those of some rows only.

        tokens, positions, rows: int64
        """
        is_selected = rows is not None and self._selects_rows
        selection = {"logits_to_keep": rows} if is_selected else {}
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            disagg=attend,
            use_cache=True,
            **{self._cache_name: cache},
            **selection,
        )
        logits: Tensor = output.logits[0]
        return logits if rows is None or is_selected else logits[rows]


Forward = ModuleForward | LlamaForward


def _linears(model: nn.Module) -> list[nn.Linear]:
    """The layers that our own forward pass has copies of, whether they can be packed or not."""
    return [getattr(parent, name) for parent, name in linear_layers(model)]


def forward_shape(model: PreTrainedModel) -> nn.Module:
    """The layers that compute a model without numbers on a CPU with room for copies."""
    return LlamaForward(model) if is_llama_like(model) else model


def forward_of(
    model: PreTrainedModel, workers: int = 1, weights: str | None = None
) -> Forward:
    """The fastest forward pass of a model on its device; on a CPU its weights are reordered.

    On a GPU steps are recorded, so calls of Python cost nothing there.

    workers: processes of this host that load the same model
    weights: "int4" or "int8", on a CPU that takes it; None: as they are
    """
    own = None
    if model.device.type == "cpu" and has_room(_linears(model), workers):
        own = llama_forward(model)
    forward = own or ModuleForward(model)
    if weights is not None:
        quantize_linears(forward, weights, workers)
    pack_linears(forward, workers)
    return forward
