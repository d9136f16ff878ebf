"""What crosses a link for a short hand-off, again and again after the link was idle.

A channel ends after half a second without hand-offs here, and not after a minute, so that a
link is idle soon. Between sender and receiver stands a proxy that counts bytes.
"""

import asyncio
import gc
from dataclasses import dataclass, replace

from disagg.bench.child import Child
from disagg.bench.handoff import POLL_S, ReceivingEnd, SendingEnd
from disagg.bench.inputs import SLAB_BYTES, shape_of
from disagg.bench.link import LOOPBACK, TcpProxy
from disagg.codecs.planning import parse_plan
from disagg.config import DEFAULT_CODEC, TransferConfig
from disagg.transfer.channel import Peers
from disagg.transfer.messages import WorkerInfo

CODEC = DEFAULT_CODEC
SHAPE = shape_of(6, 2, 64)  # of the model that ships in the package
TOKENS = 300
IDLE_S = 0.5
FORGET_S = 1.5  # until an idle stream has ended
POOL_SLABS = 6


@dataclass(frozen=True)
class Crossing:
    """Bytes of one hand-off: of its KV, and all that crossed the link."""

    payload_bytes: int
    crossed_bytes: int


class IdleSender(SendingEnd):
    """A prefill worker whose links are idle soon."""

    async def open(self) -> None:
        """Its prompt, and its channels."""
        await self.fill(CODEC, parse_plan(CODEC, SHAPE), TOKENS)
        self._peers = Peers(None, TransferConfig())
        self._peers.options = replace(
            self._peers.options, idle_s=IDLE_S, stall_s=IDLE_S
        )

    async def hand_off(self, target: WorkerInfo) -> int:
        """Send the prompt once; bytes of its KV."""
        prompt = self._prompts[CODEC]
        channel = self._peers.get(target.address)
        sender = await self._attach(prompt, channel, target, self._job(CODEC, TOKENS))
        running = asyncio.create_task(sender.run())
        while not (sender.queue.credit or running.done()):
            await asyncio.sleep(POLL_S)
        sender.offer(prompt.manifest.items)
        sender.finish(first_token=1)
        stats = await running
        return stats.payload_bytes


class IdlePair:
    """Sender, receiver and the link between them, as the object of a `Child`."""

    async def measure(self, times: int) -> list[Crossing]:
        """Hand-offs over one link, which is idle between them."""
        sender, receiver = IdleSender(), ReceivingEnd()
        await receiver.open({CODEC: parse_plan(CODEC, SHAPE)}, POOL_SLABS * SLAB_BYTES)
        info = await receiver.listen(LOOPBACK)
        proxy = TcpProxy(info.address)
        target = replace(info, address=await proxy.open())
        await sender.open()
        crossings = []
        for number in range(times):
            if number:
                await asyncio.sleep(FORGET_S)
                gc.collect()  # of what only its last hand-off referred to
            before = proxy.passed_bytes
            payload_bytes = await sender.hand_off(target)
            assert await receiver.settle() == 1
            crossings.append(Crossing(payload_bytes, proxy.passed_bytes - before))
        proxy.close()
        return crossings


def measure_crossings(times: int) -> list[Crossing]:
    """See `IdlePair.measure`."""
    with Child(IdlePair) as pair:
        crossings: list[Crossing] = pair.ask("measure", times)
    return crossings
