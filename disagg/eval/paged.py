"""Feeds tokens to the KV of a prompt under any codec; the prompt is computed once.

Pages are written, grown and attended by the functions that the workers run, so the result is that
of the service, with its kernels and 16-bit tails. Attention on a codec's `decode` would be faster,
but it would cover neither the kernels nor codecs that decide while reading.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from disagg.codecs.contract import Queries
from disagg.codecs.planning import codec_of, parse_plan
from disagg.kernels.ops import attend
from disagg.kernels.view import Softmax
from disagg.kv.plan import LayerGroup
from disagg.kv.state import GroupState, allocate_group
from disagg.model.attention import Batch, Chunk, Decode
from disagg.model.runner import Runner
from disagg.model.states.records import arena_until, record_pages
from disagg.model.states.step import NO_STATES, StatePart, StateRows, StateStep
from disagg.paged.append import RecordIds, SequenceGrowth, take_records
from disagg.paged.compressed_kv import GrowingArena
from disagg.paged.layer import LayerRecords, PromptChunk, views_of, write_prompt
from disagg.paged.page_tables import (
    appendable,
    build_tables,
    plan_step,
    plan_units,
    upload,
)

EXACT = "raw:dtype=model"
NEVER = 1 << 30  # tokens of a tail that is never sealed


@dataclass(frozen=True)
class LayerKV:
    """One layer of a prompt: k, v [H, n, D] exact, after RoPE, and its queries for codecs."""

    k: Tensor
    v: Tensor
    queries: Queries


@dataclass(frozen=True)
class PromptKV:
    """A prompt as the model computed it.

    layers: those with K and V
    states: [bytes] u8 - the records of the other layers, side by side
    """

    layers: tuple[LayerKV, ...]
    states: Tensor

    @property
    def num_tokens(self) -> int:
        return self.layers[0].k.shape[1]


def prefill(runner: Runner, tokens: Sequence[int]) -> PromptKV:
    """Exact K and V of a prompt, layer by layer, and its states."""
    total = len(tokens)
    layers: list[LayerKV] = []
    workspace = runner.workspace(total)

    def sink(layer: int, k: Tensor, v: Tensor, _: Chunk) -> None:
        layers.append(LayerKV(k, v, workspace.queries(layer)))

    chunk = Chunk(0, total, 0, workspace, sink)
    *pages, end = record_pages(runner.shape.states)
    arena = arena_until(end, 0, runner.device)
    batch = Batch(
        tokens,
        range(total),
        [total - 1],
        arena,
        (chunk,),
        states=_state_step(pages, 0, total),
    )
    runner.forward(batch)
    return PromptKV(tuple(layers), arena)


def _state_step(pages: Sequence[int], before: int, count: int) -> StateStep:
    """What a pass over tokens `before` .. of one sequence does in layers with a state."""
    if not pages:
        return NO_STATES
    if before and count == 1:
        return StateStep(singles=StateRows.of([0], [pages]))
    part = StatePart(0, count, before, pages, on_layer=lambda index: None)
    return StateStep((part,))


class PagedKV:
    """The KV of one sequence under a codec spec or a plan, from a prompt's exact K and V.

    seals: whether tails are sealed while tokens are fed, as in the service; else only the prompt is
           compressed
    """

    def __init__(self, runner: Runner, spec: str, prompt: PromptKV, seals: bool = True):
        self.plan = parse_plan(spec, runner.shape)
        self.num_tokens = prompt.num_tokens
        self._runner = runner
        self._arena = GrowingArena(runner.device)
        self._groups: list[tuple[LayerGroup, GroupState]] = []
        for group in self.plan.paged:
            state = self._write(group, prompt.layers)
            if not seals:
                group = replace(group, residual=NEVER)
            self._groups.append((group, state))
        self._state_pages = self._copy_states(prompt.states)

    def _copy_states(self, states: Tensor) -> list[int]:
        """Copy the states of a prompt into new records: the page of each."""
        layouts = self._runner.shape.states
        groups = self.plan.groups[len(self.plan.paged) :]
        starts = record_pages(layouts)
        pages = []
        for group, layout, start in zip(groups, layouts, starts, strict=False):
            (page,) = self._arena.allocate(group.record(layout), 1)
            for plane in layout.planes:
                self._arena.bytes[plane.span(page)] = states[plane.span(start)]
            pages.append(page)
        return pages

    def _write(self, group: LayerGroup, prompt: Sequence[LayerKV]) -> GroupState:
        """Encode a prompt into new records of a layer group."""
        # without a window: `attend` has queries that see more than the next token does
        whole = replace(group, window=None)
        state = allocate_group(whole, self.num_tokens, self._arena)
        record_ids = upload(RecordIds.of(state), self._runner.device)
        for layer in group.layers:
            kv = prompt[layer]
            records = LayerRecords(whole, layer, self._arena.bytes)
            chunk = PromptChunk(
                kv.k,
                kv.v,
                total=self.num_tokens,
                queries=kv.queries,
            )
            write_prompt(codec_of(group), records, record_ids, chunk)
        return state

    def attend(self, prompt: PromptKV) -> list[Tensor]:
        """Attention outputs of the last queries of the prompt, per layer: [W, Hq, D] fp32."""
        outputs: dict[int, Tensor] = {}
        device = self._runner.device
        width = prompt.layers[0].queries.last.shape[1]
        for group, state in self._groups:
            growth = SequenceGrowth(state, self.num_tokens - width, width, 0)
            tables = build_tables(codec_of(group), group, [growth], width, device)
            tables, units = upload((tables, plan_units(group, tables, device)), device)
            for layer in group.layers:
                queries = prompt.layers[layer].queries
                q = queries.last.transpose(0, 1)[None].float().contiguous()
                softmax = queries.softmax or Softmax(group.head_dim**-0.5)
                views = views_of(group, layer, self._arena.bytes, tables)
                outputs[layer] = attend(q, views, softmax, units)[0]
        return [outputs[layer] for layer in sorted(outputs)]

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Append m tokens; each sees all before it. Returns the logits after each: [m, V] fp32."""
        logits: list[Tensor] = []
        done = 0
        while done < len(tokens):
            remaining = len(tokens) - done
            count = min(
                appendable(group, self.num_tokens, remaining)
                for group, _ in self._groups
            )
            logits.append(self._step(tokens[done : done + count]))
            done += count
        return torch.cat(logits)

    def _step(self, tokens: Sequence[int]) -> Tensor:
        n = self.num_tokens
        count = len(tokens)
        decodes = []
        for group, state in self._groups:
            growths = [SequenceGrowth(state, n, count, 0)]
            records = take_records(group, growths, self._arena)
            codec = codec_of(group)
            step = plan_step(codec, group, growths, records, self._runner.device)
            decodes.append(Decode(codec, step, whole=True))
        batch = Batch(
            tokens=tokens,
            positions=range(n, n + count),
            outputs=range(count),
            arena=self._arena.bytes,
            decodes=tuple(decodes),
            states=_state_step(self._state_pages, n, count),
        )
        logits = self._runner.forward(batch)
        for decode in decodes:
            self._arena.release(decode.step.freed)
        self.num_tokens += count
        return logits
