"""Who may speak on the plane: shared token, TLS, mutual TLS."""

import asyncio
import socket

import pytest

from disagg.errors import ConfigError, PeerLostError
from disagg.transfer.channel import connect, start_server, tune_malloc
from disagg.transfer.probe import measure
from disagg.transfer.security import Security
from tests.papers import make_papers
from tests.transfer.prompts import Prompt, make_prompt
from tests.transfer.wires import hand_over, open_house


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(300)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_papers(tmp_path_factory.mktemp("papers"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(prompt: Prompt, server: Security | None, client: Security | None) -> None:
    async def scene() -> None:
        async with open_house(security=server, client=client or Security()) as house:
            sender = house.sender(prompt)
            await sender.reserve()
            await hand_over(sender, prompt)
            assert prompt.equals(house.pool.arena, house.admitted[0].groups)

    asyncio.run(scene())


def test_a_shared_token_opens_the_plane(prompt):
    run(prompt, Security(token="a secret"), Security(token="a secret"))


@pytest.mark.parametrize("client", [None, Security(token="a guess")], ids=["none", "wrong"])
def test_without_the_shared_token_every_call_is_refused(prompt, client):
    with pytest.raises(ConfigError, match="token"):
        run(prompt, Security(token="a secret"), client)


def test_tls_carries_the_plane(prompt, papers):
    server = Security(certificate=papers["peer"], key=papers["peer.key"])
    run(prompt, server, Security(ca=papers["ca"]))


def test_a_link_says_how_its_bytes_travel(papers):
    async def scene() -> None:
        server = Security(certificate=papers["peer"], key=papers["peer.key"])
        async with open_house(security=server, client=Security(ca=papers["ca"])) as house:
            assert (await measure(house.link)).transport == "gRPC over TLS"

    asyncio.run(scene())


def test_mutual_tls_and_a_token_together(prompt, papers):
    both = Security("s", papers["ca"], papers["peer"], papers["peer.key"], mutual=True)
    run(prompt, both, both)


def test_strangers_are_lost_peers(prompt, papers):
    one_way = Security(certificate=papers["peer"], key=papers["peer.key"])
    mutual = Security(None, papers["ca"], papers["peer"], papers["peer.key"], mutual=True)
    for server, client in (
        (one_way, None),  # speaks plain text to a server with TLS
        (one_way, Security(ca=papers["foreign"])),  # trusts another authority
        (mutual, Security(ca=papers["ca"])),  # has no certificate
    ):
        with pytest.raises(PeerLostError):
            run(prompt, server, client)


def test_a_server_with_tls_needs_a_certificate_and_a_key(prompt, papers):
    with pytest.raises(ConfigError, match="certificate"):
        run(prompt, Security(ca=papers["ca"]), None)


def test_malloc_can_be_tuned_where_there_is_glibc():
    assert isinstance(tune_malloc(), bool)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_host_is_an_address_like_any_other(host):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")

    async def scene() -> None:
        server, address = await start_server([], host)
        assert address.startswith("[::1]:")
        link = connect(address)
        await asyncio.wait_for(link.channel.channel_ready(), 20.0)
        assert link.streams.address(5) == "[::1]:5"
        await link.close()
        await server.stop(None)

    asyncio.run(scene())
