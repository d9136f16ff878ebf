"""The sending process with an encoder in it: synthetic K and V become pages, layer by layer.

One layer is made up and encoded again for every layer of the model; what a layer's computation
would take is left out, so that what is measured is encode and link alone.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from disagg.bench.inputs import make_prompt
from disagg.bench.source import Prompt, Sent, Source
from disagg.codecs.layer import write_prompt
from disagg.codecs.planning import codec_of
from disagg.plan import Plan
from disagg.pool import HostArena, Pool
from disagg.state import allocate_group
from disagg.transfer.items import Checklist
from disagg.transfer.pace import Pace
from disagg.transfer.sender import Sender
from disagg.wire import Item


class Encoder(Source):
    """What a benchmark asks of it."""

    def __init__(self) -> None:
        super().__init__()
        self._arenas: dict[str, Tensor] = {}
        self._layer: tuple[Tensor, Tensor] | None = None

    async def generate(self, heads: int, tokens: int, head_dim: int, threads: int) -> None:
        """Make up K and V of one layer, fp16; forget the prompts and links of before."""
        await self._stack.aclose()
        torch.set_num_threads(threads)
        made = await asyncio.to_thread(make_prompt, tokens, heads, head_dim)
        self._layer = made.k, made.v
        self._prompts.clear()
        self._arenas.clear()

    async def encode(
        self, spec: str, plan: Plan, tokens: int, slabs: int, slab_bytes: int
    ) -> float:
        """Encode all layers into records of their own; the seconds that it took."""
        arena = torch.zeros(slabs * slab_bytes, dtype=torch.uint8)
        pool = Pool(HostArena(arena.numpy().data), slab_bytes)
        states = [allocate_group(group, tokens, pool) for group in plan.groups]
        self._arenas[spec] = arena
        prompt = self._prompts[spec] = Prompt(spec, plan, tokens, pool.arena, states)
        await asyncio.to_thread(self._encode_all, prompt, lambda items: None)  # warms it up
        began = time.perf_counter()
        await asyncio.to_thread(self._encode_all, prompt, lambda items: None)
        return time.perf_counter() - began

    async def send_inline(self, link: str, spec: str, pace: Pace | None, frame_bytes: int) -> Sent:
        """Encode the same prompt again, on a thread, and send each layer when it is ready."""
        loop = asyncio.get_running_loop()

        async def offer(prompt: Prompt, sender: Sender) -> None:
            await asyncio.to_thread(
                self._encode_all,
                prompt,
                lambda items: loop.call_soon_threadsafe(sender.offer, items),
            )

        return await self._send(link, self._prompts[spec], pace, frame_bytes, offer)

    def _encode_all(self, prompt: Prompt, ready: Callable[[Sequence[Item]], object]) -> None:
        assert self._layer is not None
        k, v = self._layer
        plan, tokens, arena = prompt.plan, prompt.tokens, self._arenas[prompt.spec]
        checklist = Checklist(plan, tokens)
        for layer, index in enumerate(plan.group_of):
            group, state = plan.groups[index], prompt.states[index]
            codec = codec_of(group)
            for x in write_prompt(codec, group, state, layer, arena, k, v, 0, tokens):
                ready(checklist.select(layer, x.kind, x.first, x.count))
