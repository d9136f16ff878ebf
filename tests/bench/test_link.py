"""What lies between two processes of a benchmark: a link, a raw socket, a proxy."""

import asyncio
import os
import subprocess

import pytest

from disagg.bench import link
from disagg.bench.child import Child
from disagg.errors import ConfigError
from disagg.wire import FRAME_BYTES
from tests.processes import lives

needs_root = pytest.mark.skipif(
    not link.available(), reason="may not make network namespaces"
)


class Host:
    """A process with a network namespace."""

    async def congestion(self) -> str:
        return link.congestion()


def output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_root
def test_a_link_keeps_its_rate_and_disappears_at_the_end():
    devices_before = output(["ip", "-o", "link"])
    with Child(Host, isolated=True) as sink, Child(Host, isolated=True) as source:
        pids = [host.pid for host in (sink, source) if host.ask("congestion")]
        link.join(pids)
        link.limit(pids, 0.25)
        link.limit(pids, 2.5)

        for pid, address in zip(pids, link.HOSTS, strict=True):
            prefix = ["nsenter", f"--net=/proc/{pid}/ns/net"]
            assert address in output([*prefix, "ip", "-o", "addr"])
            queues = output([*prefix, "tc", "qdisc"])
            assert "tbf" in queues
            assert "rate 2500Mbit" in queues
        assert source.ask("congestion") == sink.ask("congestion") != "bbr"
        assert output(["ip", "-o", "link"]) == devices_before

    assert not any(map(lives, pids))


def test_without_root_the_error_names_what_a_link_needs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    assert not link.available()
    with pytest.raises(ConfigError, match="root on Linux"):
        link.check_available()


def test_the_socket_brings_every_byte():
    nbytes = FRAME_BYTES + 12345
    port = link.serve_raw("127.0.0.1", nbytes)
    data = memoryview(bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]

    assert link.send_raw("127.0.0.1", port, data) == nbytes
    assert link.send_raw("127.0.0.1", port, data[:777]) == 777


async def test_a_closed_proxy_breaks_connections_and_opens_again() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = link.TcpProxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    host, _, port = (await proxy.open()).rpartition(":")

    for _ in range(2):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"

        proxy.close()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))

        writer.close()
        assert (await proxy.open()) == f"{host}:{port}"

    proxy.close()
    server.close()
