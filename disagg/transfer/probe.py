"""How fast the link to a peer is: measured with a stream like that of hand-offs, before the first.

A slow or wrong transport is the failure that nobody notices, so workers say what they found.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from disagg.errors import PeerLostError
from disagg.protos.v1 import kv_transfer_pb2 as pb
from disagg.transfer.channel import Link
from disagg.transfer.client import SERVICE
from disagg.transfer.convert import frame_parts
from disagg.transfer.status import error_of
from disagg.wire import FRAME_BYTES, Buffer

ABSORB = f"/{SERVICE}/Absorb"
TRIPS = 5
FIRST_BYTES = 64 << 10
LONG_S = 0.02  # a slow link is not kept busy for longer than a few times this
CALL_S = 5.0


@dataclass(frozen=True)
class LinkReport:
    """What a link can do.

    round_trip_ms: of an empty message, the best of some · gbytes_per_s: of frames one after another
    """

    peer: str
    transport: str
    round_trip_ms: float
    gbytes_per_s: float

    def __str__(self) -> str:
        return (
            f"link to {self.peer}: {self.round_trip_ms:.2f} ms round trip, "
            f"{self.gbytes_per_s:.3g} GB/s, {self.transport}"
        )


async def measure(link: Link, clock: Callable[[], float] = time.perf_counter) -> LinkReport:
    """Ask a decode worker's receiver. PeerLostError if nobody is there, VersionError if it cannot.

    At most 64 KiB and three frames cross; less where they would take long.
    """
    call = link.streams.call(await _port(link), ABSORB)
    answers = call.answers()
    lost = f"{link.address} did not answer a probe"

    async def ask(nbytes: int) -> float:
        parts = frame_parts([bytes(nbytes)])
        began = clock()
        async with asyncio.timeout(CALL_S):
            await call.send(parts, sum(map(len, parts)))
            await anext(answers)
        return max(clock() - began, 1e-9)

    try:
        await ask(0)  # connects
        trip = min([await ask(0) for _ in range(TRIPS)])
        first = max(await ask(FIRST_BYTES) - trip, 1e-9)
        size = int(min(FRAME_BYTES, max(FIRST_BYTES, FIRST_BYTES * LONG_S / first)))
        seconds = min([await ask(size) for _ in range(3)])
    except TimeoutError as error:
        raise PeerLostError(f"{lost} in {CALL_S:g} s") from error
    except StopAsyncIteration as error:
        raise PeerLostError(f"{lost}: it ended the call") from error
    finally:
        call.cancel()
        await answers.aclose()
    rate = size / max(seconds - trip / 2, seconds / 2)
    return LinkReport(link.address, link.transport, 1e3 * trip, rate / 1e9)


async def absorb(messages: AsyncIterator[Buffer]) -> AsyncGenerator[bytes, None]:
    """The receiver's side: says how much came."""
    async for message in messages:
        yield pb.AbsorbResponse(bytes=len(message)).SerializeToString()


async def _port(link: Link) -> int:
    call = link.channel.unary_unary(f"/{SERVICE}/Probe")
    try:
        answer = await call(b"", timeout=CALL_S, metadata=link.metadata)
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure) from failure
    return pb.ProbeResponse.FromString(answer).push_port
