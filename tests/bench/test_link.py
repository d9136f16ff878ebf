import os
import subprocess

import pytest

from disagg.bench.child import Child
from disagg.bench.ends import ReceivingEnd, SendingEnd
from disagg.bench.link import HOSTS, ISOLATED, available, isolate, join, limit, send_raw, serve_raw
from disagg.errors import ConfigError
from disagg.wire import FRAME_BYTES
from tests.bench.test_child import running


def permitted() -> bool:
    try:
        return subprocess.run([*ISOLATED, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


needs_root = pytest.mark.skipif(not permitted(), reason="may not make network namespaces")


def output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_root
def test_both_ends_reach_each_other_at_the_rate_and_nothing_is_left():
    assert available()
    before = output(["ip", "-o", "link"])
    with Child(ReceivingEnd, isolate()) as sink, Child(SendingEnd, isolate()) as source:
        pids = [child.pid for child in (sink, source) if child.ask("cpu_seconds")]
        join(pids)
        limit(pids, 0.25)
        limit(pids, 2.5)
        for pid, host in zip(pids, HOSTS, strict=True):
            prefix = ["nsenter", f"--net=/proc/{pid}/ns/net"]
            assert host in output([*prefix, "ip", "-o", "addr"])
            queues = output([*prefix, "tc", "qdisc"])
            assert "tbf" in queues
            assert "rate 2500Mbit" in queues
        assert source.ask("congestion") == sink.ask("congestion") != "bbr"
        assert output(["ip", "-o", "link"]) == before
    assert not any(map(running, pids))


def test_without_root_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not available()
    with pytest.raises(ConfigError, match="root on Linux"):
        isolate()


def test_the_socket_brings_every_byte():
    nbytes = FRAME_BYTES + 12345
    port = serve_raw("127.0.0.1", nbytes)
    data = memoryview(bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
    assert send_raw("127.0.0.1", port, data) == nbytes
    assert send_raw("127.0.0.1", port, data[:777]) == 777
