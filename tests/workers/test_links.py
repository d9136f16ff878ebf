"""What a worker says of its links and of hand-offs that failed."""

import asyncio

import pytest
from disagg.workers.links import Links
from disagg.workers.members import Role

from disagg.errors import DisaggError
from disagg.model.runner import Runner
from tests.workers.pairs import house

KIVI = "kivi:bits=2,group=64,residual=64"
Prompt = tuple[int, ...]


def test_a_worker_says_what_its_links_can_do_and_what_failed(
    runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        async with house() as home:
            prefill = home.add("p", Role.PREFILL, runners[0])
            decode = home.add("d", Role.DECODE, runners[1])
            address = home.router.peers["d"].started.address
            (line,) = await asyncio.to_thread(prefill.meet, [address])
            assert line.startswith(f"link to {address}: ")
            await home.complete(story, KIVI)
            info = (await prefill.status()).info
            (link,) = info["links"]
            assert (link["peer"], link["transport"]) == (address, "gRPC over TCP")
            assert min(link["round_trip_ms"], link["gbytes_per_s"]) > 0
            assert info["failures"] == {}
            with pytest.raises(DisaggError):
                await home.complete(story, "kivi:bits=3")
            assert (await prefill.status()).info["failures"] == {"config": 1}
            assert (await decode.status()).info["links"] == []

    asyncio.run(scene())


def test_a_link_to_nobody_is_no_error_before_it_is_used() -> None:
    async def scene() -> None:
        links = Links(None)
        assert await links.meet(["127.0.0.1:1"]) == []
        assert links.as_info() == []
        await links.close()

    asyncio.run(scene())
