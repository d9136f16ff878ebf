import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.bench.link import (
    FRAME_BYTES,
    HOSTS,
    Namespaces,
    StreamServer,
    available,
    push_stream,
)
from disagg.errors import ConfigError
from tests.bench.test_child import wait_until_gone

PARENT = """
import signal
from disagg.bench.link import Namespaces
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
with Namespaces() as namespaces:
    print(*(holder.pid for holder in namespaces._holders), flush=True)
    signal.pause()
"""


def permitted() -> bool:
    try:
        return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


needs_root = pytest.mark.skipif(not permitted(), reason="may not make network namespaces")


def output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_root
def test_both_ends_reach_each_other_at_the_rate_and_nothing_is_left():
    before = output(["ip", "-o", "link"])
    with Namespaces() as namespaces:
        namespaces.shape(0.25)
        namespaces.shape(2.5)
        for end, host in enumerate(HOSTS):
            prefix = namespaces.prefix(end)
            assert host in output([*prefix, "ip", "-o", "addr"])
            queues = output([*prefix, "tc", "qdisc"])
            assert "tbf" in queues
            assert "rate 2500Mbit" in queues
        assert output(["ip", "-o", "link"]) == before
        pids = [holder.pid for holder in namespaces._holders]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@needs_root
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_benchmark_leaves_no_namespace(how):
    command = [sys.executable, "-c", PARENT]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(how)
    for pid in pids:
        wait_until_gone(pid)


@needs_root
def test_whoever_may_make_namespaces_has_them():
    assert available()


def test_without_root_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not available()
    with pytest.raises(ConfigError, match="root on Linux"):
        Namespaces()


def test_the_socket_brings_every_byte():
    nbytes = FRAME_BYTES + 12345
    server = StreamServer("127.0.0.1", nbytes)
    try:
        data = memoryview(bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
        assert push_stream("127.0.0.1", server.port, data) == nbytes
        assert server._memory == data
        assert push_stream("127.0.0.1", server.port, data[:777]) == 777
    finally:
        server.close()
