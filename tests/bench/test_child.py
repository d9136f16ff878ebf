"""Children of a benchmark, and what lies between two of them."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.bench import child as room
from disagg.errors import CapacityError, ConfigError, DeadlineError, PeerLostError
from disagg.wire import FRAME_BYTES
from tests.processes import lives, wait_for

PARENT = """
import os, signal
from disagg.bench.child import Child
from tests.bench.test_child import Clerk
child = Child(Clerk)
child.ask("count")
"""
WAITS = "print(child.pid, flush=True); signal.pause()"
ASKS = "os.kill(child.pid, signal.SIGINT); print(child.ask('count'))"


class Clerk:
    """Counts what it is asked; knows what TCP does there."""

    def __init__(self) -> None:
        self.asked = 0

    async def count(self) -> int:
        self.asked += 1
        return self.asked

    async def congestion(self) -> str:
        return room.congestion()

    async def refuse(self, *what: object) -> None:
        raise CapacityError(f"no room for {what}")


def test_calls_are_answered_in_turn_and_the_end_of_the_context_ends_the_process():
    with room.Child(Clerk) as child:
        assert child.ask("count") == 1
        with pytest.raises(CapacityError, match="no room for \\('a', 2\\)"):
            child.ask("refuse", "a", 2)
        assert child.ask("count") == 2
    assert not Path(f"/proc/{child.pid}").exists()


def test_a_killed_process_is_a_lost_peer():
    with room.Child(Clerk) as child:
        child.ask("count")
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="ended with -9"):
            child.ask("count")


def test_a_process_that_hangs_is_told_of_and_does_not_stay(monkeypatch):
    monkeypatch.setattr(room, "ANSWER_S", 0.1)
    monkeypatch.setattr(room, "END_S", 0.1)
    with room.Child(Clerk) as child:
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"no answer to count in 0.1 s"):
            child.ask("count")
    assert not lives(child.pid)


def test_ctrl_c_is_for_the_parent_alone():
    done = subprocess.run(
        [sys.executable, "-c", PARENT + ASKS], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_child_ends_with_its_killed_parent():
    command = [sys.executable, "-c", PARENT + WAITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert lives(pid)
        parent.kill()
    wait_for(lambda: not lives(pid), 30)


needs_root = pytest.mark.skipif(
    not room.available(), reason="may not make network namespaces"
)


def output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_root
def test_both_ends_reach_each_other_at_the_rate_and_nothing_is_left():
    before = output(["ip", "-o", "link"])
    with (
        room.Child(Clerk, isolated=True) as sink,
        room.Child(Clerk, isolated=True) as source,
    ):
        pids = [child.pid for child in (sink, source) if child.ask("congestion")]
        room.join(pids)
        room.limit(pids, 0.25)
        room.limit(pids, 2.5)
        for pid, host in zip(pids, room.HOSTS, strict=True):
            prefix = ["nsenter", f"--net=/proc/{pid}/ns/net"]
            assert host in output([*prefix, "ip", "-o", "addr"])
            queues = output([*prefix, "tc", "qdisc"])
            assert "tbf" in queues
            assert "rate 2500Mbit" in queues
        assert source.ask("congestion") == sink.ask("congestion") != "bbr"
        assert output(["ip", "-o", "link"]) == before
    assert not any(map(lives, pids))


def test_without_root_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not room.available()
    with pytest.raises(ConfigError, match="root on Linux"):
        room.check_available()


def test_the_socket_brings_every_byte():
    nbytes = FRAME_BYTES + 12345
    port = room.serve_raw("127.0.0.1", nbytes)
    data = memoryview(bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
    assert room.send_raw("127.0.0.1", port, data) == nbytes
    assert room.send_raw("127.0.0.1", port, data[:777]) == 777


def test_a_door_that_is_shut_breaks_what_is_through_and_opens_again() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    async def scene() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        door = room.TcpProxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        host, _, port = (await door.open()).rpartition(":")
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            door.shut()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(host, int(port))
            writer.close()
            assert (await door.open()) == f"{host}:{port}"
        door.shut()
        server.close()

    asyncio.run(scene())
