"""Whether our pages can serve a model's attention: tested on the model itself, once, at load.

A config does not say everything. A short forward pass through our attention shows which layers call
it, and with which arguments. Comparing its logits with those of the model's own eager attention
shows that the model does nothing else to attention.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from disagg.errors import ModelError
from disagg.kernels.view import Softmax
from disagg.model.attention import IMPLEMENTATION, attend_exact, disagg_attention
from disagg.model.cache import pass_through
from disagg.model.describe import ModelInfo

MASKED = "disagg-masked"  # our attention, with masks that only carry the window's size
# two prompts packed into one row: positions must come from position_ids
LENGTHS = (9, 14)
FOREIGN_ERRORS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # of the largest logit


@dataclass
class Probe:
    """Answers attention calls exactly, and records them.

    calls:      of each call the layer, heads, KV heads and head dim
    objections: what pages cannot serve
    """

    windows: tuple[int | None, ...]
    calls: list[tuple[int, int, int, int]] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: Softmax,
        options: dict,
    ) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(self.windows):
            raise ModelError(
                f"{type(module).__name__} calls attention as layer {layer}"
            )
        if v.shape != k.shape:
            self.objections.append(
                f"values of {v.shape[-1]} and keys of {k.shape[-1]} channels"
            )
        if options.get("position_bias") is not None:
            self.objections.append("a position bias")
        window = self.windows[layer]
        self._check_window(window, options)
        self.calls.append((layer, q.shape[0], k.shape[0], k.shape[2]))
        prompts = zip(
            q.split(LENGTHS, dim=1),
            k.split(LENGTHS, dim=1),
            v.split(LENGTHS, dim=1),
            strict=True,
        )
        outputs = [
            attend_exact(prompt_q, prompt_k, prompt_v, softmax, window)
            for prompt_q, prompt_k, prompt_v in prompts
        ]
        # contiguous, since some models take a view of it
        return torch.cat(outputs, dim=1).transpose(0, 1).contiguous()

    def _check_window(self, window: int | None, options: dict) -> None:
        """Object to a window other than the config's, as an argument or in the mask alone."""
        mask = options["attention_mask"]
        mask_window = window if mask is None else int(mask) or None
        argument = options.get("sliding_window", window)
        for other in {mask_window, argument} - {window}:
            self.objections.append(
                f"a window of {other} where its config says {window}"
            )


def window_as_mask(
    local_size: int | None = None, device: Any = None, **_: object
) -> Tensor:
    """A mask function for transformers: [1, 1, 1, 1], the size of the window; 0: none."""
    return torch.full((1, 1, 1, 1), local_size or 0, device=device)


AttentionInterface.register(MASKED, disagg_attention)
AttentionMaskInterface.register(MASKED, window_as_mask)


def check_attention(model: PreTrainedModel, info: ModelInfo) -> None:
    """Raise ModelError unless pages can serve the attention of this model."""
    name = info.architecture
    count = torch.arange(sum(LENGTHS), device=model.device)
    prompts = count.mul(7919).remainder(info.vocab_size)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(model.device)
    probe = Probe(info.windows)
    model.set_attn_implementation(MASKED)
    logits = _logits(
        model,
        name,
        input_ids=prompts[None],
        position_ids=positions[None],
        disagg=probe.attend,
        **pass_through(model),
    )
    expected = [
        (layer, info.query_heads, info.heads, info.head_dim)
        for layer in range(info.num_layers)
    ]
    if probe.objections:
        objections = ", ".join(dict.fromkeys(probe.objections))
        raise ModelError(f"{name} attends with {objections}: not supported")
    if probe.calls != expected:
        raise ModelError(
            f"{name} called our attention as (layer, heads, KV heads, head dim) {probe.calls}; "
            f"its config says {expected}: not supported"
        )
    model.set_attn_implementation("eager")
    exact = torch.cat(
        [_logits(model, name, input_ids=x[None]) for x in prompts.split(LENGTHS)]
    )
    model.set_attn_implementation(IMPLEMENTATION)
    error = float((logits - exact).abs().max() / exact.abs().max())
    if not error <= TOLERANCE[info.dtype]:
        raise ModelError(
            f"{name} gives other logits (by {error:.2g}) with plain attention: not supported"
        )


def _logits(model: PreTrainedModel, name: str, **inputs: Any) -> Tensor:
    """[N, V] of one row; ModelError if the model needs what we do not give, such as a cache."""
    try:
        return model(**inputs).logits[0]
    except torch.OutOfMemoryError:
        raise
    except FOREIGN_ERRORS as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(
            f"{name} does not run on pages ({reason}): not supported"
        ) from error
