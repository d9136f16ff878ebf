"""Anything a peer may send, whatever its bytes: a typed error or a right answer, never more.

A minute of it runs with `-m slow`; a short run is part of every test run.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest

from disagg.errors import DisaggError
from disagg.protos.v1 import kv_transfer_pb2 as pb
from disagg.transfer import convert
from disagg.transfer.receiver import Receiver
from disagg.wire import CommitFrame, RenewFrame, Ticket, pack
from tests.transfer.prompts import Prompt, make_pool, make_prompt, make_terms

CALLS = ("reserve", "attach", "commit", "abort_call", "release")


def seeds(prompt: Prompt, ticket: Ticket) -> dict[str, list[bytes]]:
    """Honest messages of every call, to be bent."""
    frames = [RenewFrame(ticket), *prompt.frames(ticket), CommitFrame(ticket, prompt.commit())]
    named = pb.AttachRequest(ticket=convert.ticket_to(ticket)).SerializeToString()
    return {
        "reserve": [convert.request_to(prompt.request("r", 1)).SerializeToString()],
        "attach": [named],
        "release": [named],
        "abort_call": [pb.AbortRequest(rid="q", attempt=3, reason="x").SerializeToString()],
        "commit": [convert.frame_message(pack(frames[-1]))],
        "push": [convert.frame_message(pack(frame)) for frame in frames],
    }


def bend(source: random.Random, data: bytes) -> bytes:
    """A message with a few bytes changed, cut out, doubled or put in."""
    bent = bytearray(data)
    for _ in range(source.choice((0, 1, 1, 2, 8))):
        place = source.randrange(len(bent) + 1)
        length = source.choice((1, 1, 2, 4, 30))
        how = source.randrange(4)
        if how == 0:
            bent[place : place + length] = source.randbytes(min(length, len(bent) - place))
        elif how == 1:
            del bent[place : place + length]
        elif how == 2:
            bent[place:place] = bent[place : place + length]
        else:
            bent[place:place] = source.choice((b"\0", b"\xff", b"\x80" * 9)) * length
    return bytes(bent)


async def attack(prompt: Prompt, seed: int) -> None:
    """One hand-off under fire; ends with everything given back."""
    source = random.Random(seed)
    pool = make_pool()
    admitted = []
    receiver = Receiver(
        make_terms(pool), pool, pool.arena, admitted.append, lambda *drop: None, lambda: 0.0
    )
    request = convert.request_to(prompt.request()).SerializeToString()
    grant = pb.ReserveResponse.FromString(await receiver.reserve(request))
    ticket = Ticket(grant.nonce, grant.epoch, 1)
    await receiver.attach(seeds(prompt, ticket)["attach"][0])
    honest = seeds(prompt, ticket)
    for _ in range(12):
        call = source.choice((*CALLS, "push", "push"))
        try:
            if call == "push":
                await _push(receiver, source, honest["push"])
            else:
                async with asyncio.timeout(5.0):
                    await getattr(receiver, call)(bend(source, honest[call][0]))
        except DisaggError:
            continue
    assert all(prompt.equals(pool.arena, admission.groups) for admission in admitted)
    for admission in admitted:
        for state in admission.groups:
            pool.release(list(state.ids()))
        receiver.finished(admission.rid, admission.attempt)
    receiver.fence(99)
    pool.check_integrity()
    assert pool.referenced_pages == 0


async def _push(receiver: Receiver, source: random.Random, honest: list[bytes]) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for message in honest:
            yield message if source.random() < 0.8 else bend(source, message)

    async for reply in receiver.push(stream()):
        pb.PushResponse.FromString(reply)


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(130)


def test_bent_messages_end_in_typed_errors_and_leak_nothing(prompt):
    for seed in range(150):
        asyncio.run(attack(prompt, seed))


@pytest.mark.slow
def test_a_minute_of_bent_messages_ends_in_typed_errors_and_leaks_nothing(prompt):
    seed, end = 1000, time.monotonic() + 60.0
    while time.monotonic() < end:
        asyncio.run(attack(prompt, seed))
        seed += 1
