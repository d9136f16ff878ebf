"""Rates beside vLLM's, from what its client measured."""

from pathlib import Path

import pytest

from benchmarks import vllm_cpu
from benchmarks.servers import Server, VllmEnvironment
from benchmarks.vllm_cpu import PeerOptions

OPTIONS = PeerOptions(Path("/env"), Path("/model"), sizes=["1x512"], rounds=3)
RATES = {"vllm": [10.0, 30.0, 20.0], "split": [30.0, 5.0, 31.0]}


@pytest.fixture
def measured(monkeypatch):
    """Servers that answer at these rates, in the order of the turns."""
    turns = []
    rates = {name: iter(values) for name, values in RATES.items()}

    def measure(_options, server, size, seed, _folder):
        turns.append((server.name, size, seed))
        figures = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_p99_ms"), 1.0)
        return {"tokens_per_s": next(rates[server.name]), "load": 0.5, **figures}

    class Servers:
        def __enter__(self):
            return [Server(name, "http://") for name in RATES]

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(vllm_cpu, "warm_servers", lambda *_: Servers())
    monkeypatch.setattr(vllm_cpu, "measure_server", measure)
    monkeypatch.setattr(VllmEnvironment, "version", lambda _: "1")
    return turns


def test_ratios_are_of_medians_of_rounds(measured):
    rows = vllm_cpu.measure_peers(OPTIONS)["rows"]

    assert [(row["server"], row["ratio"]) for row in rows] == [
        ("vllm", 1.0),
        ("split", 1.5),
    ]


def test_servers_take_turns_and_no_seed_comes_twice(measured):
    vllm_cpu.measure_peers(OPTIONS)

    assert [server for server, _, _ in measured] == ["vllm", "split"] * 3
    assert len({seed for _, _, seed in measured}) == 6
