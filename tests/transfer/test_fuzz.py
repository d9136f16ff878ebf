"""Anything a peer may send, whatever its bytes: a typed error or a right answer, never more.

A minute of it runs with `-m slow`; a short run is part of every test run.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from disagg.errors import DisaggError
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.transfer.messages import Attach, FrameAnswer, ticket_to_proto
from disagg.transfer.receiver import Receiver
from disagg.wire import Ticket, frame_message, pack
from tests.transfer.desk import bend
from tests.transfer.peer import Peer
from tests.transfer.prompts import EPOCH, MODEL, Prompt

TOKENS = 130


def seeds(prompt: Prompt, ticket: Ticket) -> dict[str, list[bytes]]:
    """Honest messages of every call, to be bent."""
    attach = Attach(ticket, MODEL, prompt.plan.fingerprint, prompt.tokens)
    commit = prompt.commit(ticket)
    return {
        "attach": [attach.to_proto().SerializeToString()],
        "renew": [
            kv.RenewRequest(tickets=[ticket_to_proto(ticket)]).SerializeToString()
        ],
        "commit": [frame_message(pack(commit))],
        "push": [
            frame_message(pack(frame)) for frame in [*prompt.frames(ticket), commit]
        ],
    }


async def attack(prompt: Prompt, seed: int) -> None:
    """One hand-off under fire; ends with everything given back."""
    source, peer = random.Random(seed), Peer(clock=None)
    receiver = peer.receiver
    honest = seeds(prompt, replace(peer.promise(prompt).ticket, gen=1))
    await receiver.attach(honest["attach"][0])
    for _ in range(12):
        call = source.choice(("attach", "renew", "commit", "push", "push"))
        try:
            if call == "push":
                await _push(receiver, source, honest["push"])
            else:
                async with asyncio.timeout(5.0):
                    await getattr(receiver, call)(bend(source, honest[call][0]))
        except DisaggError:
            continue
    for admission in peer.engine.values():
        assert prompt.equals(peer.pool.arena, admission.groups)
    peer.ledger.fence(EPOCH + 1)
    peer.close()


async def _push(receiver: Receiver, source: random.Random, honest: list[bytes]) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for message in honest:
            yield message if source.random() < 0.8 else bend(source, message)

    async for reply in receiver.push(stream()):
        FrameAnswer.from_proto(kv.PushResponse.FromString(reply))


def test_bent_messages_end_in_typed_errors_and_leak_nothing(prompt):
    for seed in range(150):
        asyncio.run(attack(prompt, seed))


@pytest.mark.slow
def test_a_minute_of_bent_messages_leaks_nothing(prompt):
    seed, end = 1000, time.monotonic() + 60.0
    while time.monotonic() < end:
        asyncio.run(attack(prompt, seed))
        seed += 1
