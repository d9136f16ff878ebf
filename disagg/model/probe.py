"""Whether our pages can serve a model's attention: asked of the model itself, once, at load.

A config says only so much. A short forward pass through our attention shows which layers call it
and with what; comparing its logits with the model's own eager attention shows that nothing
happens to attention that we do not see.
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

MASKED = (
    "disagg-masked"  # our attention, and masks that only say which window they are of
)
LENGTHS = (
    9,
    14,
)  # two prompts packed into one row: positions must come from position_ids
FOREIGN_ERRORS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # of the largest logit


@dataclass
class Probe:
    """Answers attention calls exactly, and notes what every layer asked for."""

    windows: tuple[int | None, ...]
    seen: list[tuple[int, int, int, int]] = field(default_factory=list)
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
        mask = options["attention_mask"]
        masked = (
            window if mask is None else int(mask) or None
        )  # models may mask and say nothing
        for other in {masked, options.get("sliding_window", window)} - {window}:
            self.objections.append(
                f"a window of {other} where its config says {window}"
            )
        self.seen.append((layer, q.shape[0], k.shape[0], k.shape[2]))
        prompts = zip(*(x.split(LENGTHS, dim=1) for x in (q, k, v)), strict=True)
        parts = [attend_exact(a, b, c, softmax, window) for a, b, c in prompts]
        return (
            torch.cat(parts, dim=1).transpose(0, 1).contiguous()
        )  # as some models view it


def window_as_mask(
    local_size: int | None = None, device: Any = None, **_: object
) -> Tensor:
    """What transformers asks for in place of a mask: [1, 1, 1, 1], its window; 0: none."""
    return torch.full((1, 1, 1, 1), local_size or 0, device=device)


AttentionInterface.register(MASKED, disagg_attention)
AttentionMaskInterface.register(MASKED, window_as_mask)


def check_attention(model: PreTrainedModel, info: ModelInfo) -> None:
    """Raise ModelError unless pages can serve the attention of this model."""
    name = info.architecture
    prompts = (
        torch.arange(sum(LENGTHS), device=model.device)
        .mul(7919)
        .remainder(info.vocab_size)
    )
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
        what = ", ".join(dict.fromkeys(probe.objections))
        raise ModelError(f"{name} attends with {what}: not supported")
    if probe.seen != expected:
        raise ModelError(
            f"{name} called our attention as (layer, heads, KV heads, head dim) {probe.seen}; "
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
    """[N, V] of one row; ModelError where the model wants what we do not give, such as a cache."""
    try:
        return model(**inputs).logits[0]
    except torch.OutOfMemoryError:
        raise
    except FOREIGN_ERRORS as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(
            f"{name} does not run on pages ({what}): not supported"
        ) from error
