"""Whether our pages can serve a model's attention: tested on the model itself, once, at load.

A config does not say everything. A short forward pass through our attention shows which layers call
it, and with which arguments. Comparing its logits with those of the model's own eager attention
shows that the model does nothing else to attention. Latents are attended in both ways: expanded,
and asked by the queries themselves. Where layers keep a state, two more passes go
on from it: a chunk of one prompt beside a single token of the other, then a token of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from disagg.errors import ModelError
from disagg.kernels.view import Softmax
from disagg.kv.page import Layout
from disagg.kv.plan import LayerShape
from disagg.model.attention import (
    IMPLEMENTATION,
    attend_exact,
    attend_visible,
    disagg_attention,
)
from disagg.model.cache import cache_name
from disagg.model.describe import ModelInfo
from disagg.model.latents import Heads, heads_of, own_expansion
from disagg.model.states.cache import StepCache
from disagg.model.states.records import arena_until, record_pages
from disagg.model.states.step import NO_STATES, StatePart, StateRows, StateStep

MASKED = "disagg-masked"  # our attention, with masks that only carry the window's size
# two prompts packed into one row: positions must come from position_ids
LENGTHS = (9, 14)
CONTINUED = ((5, 1), (1, 1))  # the next tokens of both
FOREIGN_ERRORS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # of the largest logit


@dataclass
class Probe:
    """Answers attention calls exactly, and records them.

    counts:     tokens of each prompt in the row of this pass
    calls:      of each call of this pass the layer, heads, KV heads and head dim
    objections: what pages cannot serve
    """

    layers: Sequence[LayerShape]
    sources: Sequence[int]
    counts: Sequence[int] = LENGTHS
    calls: list[tuple[int, int, int, int]] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)
    # K and V [H, n, D] of a prompt so far, by layer and prompt
    _exact: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def begin(self, counts: Sequence[int]) -> None:
        """Another pass, whose row has these counts of tokens."""
        self.counts = counts
        self.calls = []

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: Softmax,
        options: dict,
    ) -> Tensor:
        call = len(self.calls)
        if call >= len(self.sources):
            raise ModelError(
                f"{type(module).__name__} calls attention more often than its config says, "
                f"{len(self.sources)} times: not supported"
            )
        layer = self.sources[call]
        shape = self.layers[layer]
        if v.shape[-1] != (shape.latent or k.shape[-1]):
            raise ModelError(
                f"{type(module).__name__} attends with values of {v.shape[-1]} and keys of "
                f"{k.shape[-1]} channels: not supported"
            )
        if options.get("position_bias") is not None:
            self.objections.append("a position bias")
        self._check_window(shape.window, options)
        self.calls.append((call, q.shape[0], k.shape[0], k.shape[2]))
        prompts = zip(
            q.split(self.counts, dim=1),
            k.split(self.counts, dim=1),
            v.split(self.counts, dim=1),
            strict=True,
        )
        outputs = []
        for index, (prompt_q, new_k, new_v) in enumerate(prompts):
            if layer not in self.sources[:call]:
                self._extend((layer, index), new_k, new_v)
            prompt_k, prompt_v = self._exact[layer, index]
            exact = (prompt_q, prompt_k, prompt_v, softmax)
            if shape.latent is None:
                output = attend_visible(*exact, shape, prompt_k.shape[1])
            else:
                output = attend_latents(heads_of(module), *exact)
            outputs.append(output)
        # contiguous, since some models take a view of it
        return torch.cat(outputs, dim=1).transpose(0, 1).contiguous()

    def _extend(self, key: tuple[int, int], new_k: Tensor, new_v: Tensor) -> None:
        """Append to the K and V of a prompt in a layer."""
        if key in self._exact:
            k, v = self._exact[key]
            new_k = torch.cat([k, new_k], 1)
            new_v = torch.cat([v, new_v], 1)
        self._exact[key] = (new_k, new_v)

    def _check_window(self, window: int | None, options: dict) -> None:
        """Object to a window other than the config's, as an argument or in the mask alone."""
        mask = options["attention_mask"]
        mask_window = window if mask is None else int(mask) or None
        argument = options.get("sliding_window", window)
        for other in {mask_window, argument} - {window}:
            self.objections.append(
                f"a window of {other} where its config says {window}"
            )


def attend_latents(
    heads: Heads, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
) -> Tensor:
    """Causal attention of the last c tokens to latents: [Hq, c, D].

    The first half of them attends as prompts do, the others as new tokens do.
    """
    expanded = attend_exact(q, *heads.expand(k, v), softmax, None)
    asked = attend_exact(heads.ask(q), k, v, softmax, None)
    answers = heads.answer(asked.transpose(0, 1)).transpose(0, 1)
    half = q.shape[1] // 2
    return torch.cat([expanded[:, :half], answers[:, half:]], 1)


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
    passes = [LENGTHS, *CONTINUED] if info.states else [LENGTHS]
    lengths = [sum(counts) for counts in zip(*passes, strict=True)]
    count = torch.arange(sum(lengths), device=model.device)
    prompts = count.mul(7919).remainder(info.vocab_size).split(lengths)
    model.set_attn_implementation(MASKED)
    logits = _packed_logits(model, info, prompts, passes)
    model.set_attn_implementation("eager")
    with own_expansion(model):
        exact = torch.cat([_logits(model, name, input_ids=x[None]) for x in prompts])
    model.set_attn_implementation(IMPLEMENTATION)
    errors = (logits - exact).abs().amax(1) / exact.abs().max()
    error = float(errors.max())
    rounds_otherwise = bool(info.states) or info.layers[0].latent is not None
    if rounds_otherwise and info.dtype != "float32":
        error = _median_error(errors, passes)
    if not error <= TOLERANCE[info.dtype]:
        raise ModelError(
            f"{name} gives other logits (by {error:.2g}) with plain attention: not supported"
        )


def _median_error(errors: Tensor, passes: Sequence[Sequence[int]]) -> float:
    """The largest of four medians: of both halves of fresh tokens, continued chunks, single tokens.

    A scan rounds otherwise when it is cut, and queries when they ask latents, as the second half
    does: by enough in 16 bits to send a token to other experts. That is a token here and there; a
    state that is lost or mixed up shows in all that follow it.
    """
    kinds = []
    for counts in zip(*passes, strict=True):
        first, *others = counts
        half = first // 2
        kinds += ["fresh"] * half + ["later"] * (first - half)
        for count in others:
            kinds += ["single" if count == 1 else "chunk"] * count
    medians = []
    for kind in dict.fromkeys(kinds):
        tokens = [index for index, x in enumerate(kinds) if x == kind]
        medians.append(errors[tokens].median())
    return float(torch.stack(medians).max())  # NaN stays NaN


def _packed_logits(
    model: PreTrainedModel,
    info: ModelInfo,
    prompts: Sequence[Tensor],
    passes: Sequence[Sequence[int]],
) -> Tensor:
    """The logits of all tokens, prompt by prompt, computed in packed rows.

    passes: of each row the tokens of each prompt
    ModelError for attention that pages cannot serve.
    """
    probe = Probe(info.layers, info.sources)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    starts = [0] * len(prompts)
    pages, arena = _records(info.states, len(prompts), model.device)
    for counts in passes:
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        spans = list(map(slice, starts, ends))
        tokens = [x[span] for x, span in zip(prompts, spans, strict=True)]
        positions = torch.cat([torch.arange(x.start, x.stop) for x in spans])
        position_ids = positions.to(model.device)[None]
        probe.begin(counts)
        step = (
            _state_step(counts, starts, pages, model.device)
            if info.states
            else NO_STATES
        )
        row = _logits(
            model,
            info.architecture,
            input_ids=torch.cat(tokens)[None],
            position_ids=position_ids,
            disagg=probe.attend,
            use_cache=True,
            **{cache_name(model): StepCache(step, arena, position_ids)},
        )
        for rows, part in zip(logits, row.split(list(counts)), strict=True):
            rows.append(part)
        _check_calls(probe, info)
        starts = ends
    return torch.cat([part for rows in logits for part in rows])


def _records(
    layouts: Sequence[Layout], count: int, device: torch.device
) -> tuple[list[list[int]], Tensor]:
    """Pages of the states of `count` sequences, and an arena for them, full of NaN."""
    pages: list[list[int]] = []
    end = 0
    for _ in range(count):
        *own_pages, end = record_pages(layouts, end)
        pages.append(own_pages)
    return pages, arena_until(end, 0xFF, device)


def _state_step(
    counts: Sequence[int],
    starts: Sequence[int],
    pages: Sequence[Sequence[int]],
    device: torch.device,
) -> StateStep:
    """What a pass does with states: the next `counts` tokens of each prompt."""
    parts = []
    rows = []
    pages_of_rows = []
    row = 0
    for count, start, own_pages in zip(counts, starts, pages, strict=True):
        if start and count == 1:
            rows.append(row)
            pages_of_rows.append(own_pages)
        else:
            part = StatePart(row, count, start, own_pages, on_layer=_ignore)
            parts.append(part)
        row += count
    if not rows:
        return StateStep(tuple(parts))
    step = StateStep(tuple(parts), StateRows.of(rows, pages_of_rows))
    return step.with_tables(tuple(table.to(device) for table in step.tables))


def _ignore(_layer: int) -> None:
    pass


def _check_calls(probe: Probe, info: ModelInfo) -> None:
    """ModelError unless the calls of a pass are those that the config describes."""
    name = info.architecture
    expected = [
        (call, info.query_heads, info.layers[layer].heads, info.layers[layer].head_dim)
        for call, layer in enumerate(info.sources)
    ]
    if probe.objections:
        objections = ", ".join(dict.fromkeys(probe.objections))
        raise ModelError(f"{name} attends with {objections}: not supported")
    if probe.calls != expected:
        raise ModelError(
            f"{name} called our attention as (layer, heads, KV heads, head dim) {probe.calls}; "
            f"its config says {expected}: not supported"
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
