"""A follower's side of an engine: it does to its arena and model what rank 0 does to its own.

No scheduler, no pool, no sampler: an order says which pages. See `orders.py`.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor

from disagg.codecs.planning import KVShape, parse_plan
from disagg.engine.arena import make_arena, view_arena
from disagg.engine.exact_prefixes import prefix_plan, read_units, write_units
from disagg.engine.orders import ArenaOrder, ChunkOrder, PromptOrder, StepOrder
from disagg.engine.prompts import encode_chunk
from disagg.engine.sequence import Handoff
from disagg.kv.page import RAW_TOKENS, Item
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.state import GroupState
from disagg.model.attention import Batch, Chunk, Decode
from disagg.model.cache import Workspace
from disagg.model.runner import Runner


class FollowerHandoff(Handoff, Protocol):
    """The same on a follower, where no output of an engine says when it is over."""

    def computed(self) -> None:
        """All that this rank encodes is offered."""


class NoHandoff:
    """Of a sequence whose hand-off was given up, or of one between two engines of a process."""

    def begin(self, plan: Plan, groups: Seq[GroupState]) -> None:
        pass

    def offer(self, items: Seq[Item]) -> None:
        pass

    def has(self, item: Item) -> bool:
        return False

    def computed(self) -> None:
        pass


def own_group(shape: KVShape, group: LayerGroup) -> LayerGroup:
    """A group as the rank with this shape has it: rank 0's but for the numbers of its heads."""
    return replace(group, first_head=shape.layers[group.layers[0]].first_head)


@dataclass(frozen=True)
class FollowedPrompt:
    """A prompt that computes, as far as its records go."""

    plan: Plan
    prompt_len: int
    cached: int
    handoff: FollowerHandoff | None
    workspace: Workspace


class Follower:
    """The arena of one engine on another rank than 0, and its prompts that compute.

    pages: its arena, as hand-offs read and write it
    plan:  the plan of a codec spec, with the heads of this rank
    """

    def __init__(
        self,
        runner: Runner,
        order: ArenaOrder,
        handoffs: Mapping[str, FollowerHandoff],
    ):
        """handoffs: of this rank, by the engine's name of a sequence; they come and go"""
        self.arena = make_arena(order.nbytes, order.scratch, runner.device)
        self.pages = view_arena(self.arena, order.scratch)
        shape = replace(runner.shape, state_form=order.state_form)
        self.plan = lru_cache(maxsize=64)(lambda spec: parse_plan(spec, shape))
        self._own_group = lru_cache(maxsize=64)(partial(own_group, shape))
        self._handoffs = handoffs
        self._runner = runner
        self._prefix_plan = prefix_plan(runner.shape)
        self._prompts: dict[int, FollowedPrompt] = {}
        # sums of squares of queries, by the raw page whose unit they are of
        self._squares: dict[int, Tensor] = {}

    @torch.inference_mode()
    def step(self, order: StepOrder) -> Tensor | None:
        """Take part in a step; the logits, or None for an order without tokens."""
        for number in order.ended:
            del self._prompts[number]
        for handoff in order.handoffs:
            plan = self.plan(handoff.codec)
            self._handoff(handoff.rid).begin(plan, handoff.groups)
        for prompt in order.begun:
            self._begin(prompt)
        if not order.tokens:
            return None
        batch = Batch(
            tokens=order.tokens,
            positions=order.positions,
            outputs=order.outputs,
            arena=self.arena,
            chunks=tuple(map(self._chunk, order.chunks)),
            decodes=tuple(map(self._own_decode, order.decodes)),
            long_rows=order.long_rows,
            recordings=order.recordings,
        )
        logits = self._runner.forward(batch)
        for chunk in order.chunks:
            self._note_squares(chunk)
            self._note_end(chunk)
        return logits

    def _own_decode(self, decode: Decode) -> Decode:
        """With the numbers of this rank's heads, on which bytes of sealed pages depend."""
        group = self._own_group(decode.step.group)
        return replace(decode, step=replace(decode.step, group=group))

    def _handoff(self, rid: str) -> FollowerHandoff:
        return self._handoffs.get(rid) or NoHandoff()

    def _begin(self, order: PromptOrder) -> None:
        workspace = self._runner.workspace(order.total, order.rooms)
        if order.reserved:
            dtype = getattr(torch, self._runner.info.dtype)
            workspace.reserve(dtype, self._runner.device)
        if order.cached:
            squares = self._squares_of(order)
            plan = self._prefix_plan
            read_units(plan, self.arena, workspace, order.prefix, squares, order.cached)
        self._prompts[order.number] = FollowedPrompt(
            plan=self.plan(order.codec),
            prompt_len=order.total,
            cached=order.cached,
            handoff=self._handoff(order.rid) if order.hands_off else None,
            workspace=workspace,
        )

    def _squares_of(self, order: PromptOrder) -> list[Tensor]:
        """The notes of the cached units, of a group that has all of them."""
        for pages in order.prefix:
            if len(pages) * RAW_TOKENS == order.cached:
                return [self._squares[x] for x in pages if x in self._squares]
        return []

    def _chunk(self, order: ChunkOrder) -> Chunk:
        prompt = self._prompts[order.number]
        done = order.before + order.count
        plan = self._prefix_plan

        def on_layer(layer: int, k: Tensor, v: Tensor, chunk: Chunk) -> None:
            encode_chunk(prompt, layer, k, v, chunk, self.arena)
            tables = chunk.tables.prefix_pages
            write_units(plan, self.arena, order.first_unit, done, layer, k, v, tables)

        return Chunk(
            row=order.row,
            count=order.count,
            before=order.before,
            workspace=prompt.workspace,
            on_layer=on_layer,
            tables=order.tables,
        )

    def _note_squares(self, order: ChunkOrder) -> None:
        workspace = self._prompts[order.number].workspace
        for pages in order.tables.prefix_pages:
            for unit, page in enumerate(pages.tolist(), order.first_unit):
                squares = workspace.squares(unit)
                if squares is None:
                    self._squares.pop(page, None)
                else:
                    self._squares[page] = squares

    def _note_end(self, order: ChunkOrder) -> None:
        """After the last chunk of a prompt, its hand-off has everything."""
        prompt = self._prompts[order.number]
        is_last = order.before + order.count == prompt.prompt_len
        if is_last and prompt.handoff is not None:
            prompt.handoff.computed()
