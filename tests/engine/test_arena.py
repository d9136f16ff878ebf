from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import EngineConfig
from disagg.engine.arena import (
    MAX_WRITES,
    DeviceArena,
    SideStream,
    make_pool,
    max_rows,
    measure_memory,
)
from disagg.kv.page import make_state_layout
from disagg.kv.plan import LayerShape, RecordShape
from disagg.kv.pool import Pool
from disagg.transfer.records import ArenaSource
from tests.transfer.desk import Desk
from tests.transfer.prompts import make_prompt

SHAPE = RecordShape("a", 1280, zeroed=True)
CUDA = torch.device("cuda")


def test_the_pool_and_the_kernels_see_the_same_bytes():
    pool, tensor = make_pool(1 << 20, 1 << 18, torch.device("cpu"))
    (page,) = pool.allocate(SHAPE, 1)
    pool.arena.write([(page * 128 + 3, b"abc")])
    assert bytes(tensor[page * 128 : page * 128 + 7].tolist()) == b"\0\0\0abc\0"


def test_a_device_arena_copies_both_ways():
    arena = DeviceArena(torch.ones(512, dtype=torch.uint8))
    arena.write([(128, memoryview(b"abcd")), (256, b"ef")])
    arena.write([])  # of a frame whose items were there before
    arena.zero([(130, 1), (400, 112)])
    arena.zero([])
    assert bytes(arena.read(127, 6)) == b"\x01ab\0d\x01"
    assert bytes(arena.read(399, 113)) == b"\x01" + bytes(112)
    assert [bytes(x) for x in arena.stage([(256, 3), (128, 2)])()] == [b"ef\x01", b"ab"]
    assert arena.stage([])() == []
    assert arena.nbytes == 512


class StandInStream:
    """Knows the streams that it waited for."""

    def __init__(self, device: torch.device):
        self.device, self.waited = device, list[StandInStream]()
        self.wait_stream, self.record_event = self.waited.append, MagicMock()


def test_scrub_and_resend_wait_for_no_kernels(monkeypatch):
    decode, started = StandInStream(CUDA), list[StandInStream]()
    monkeypatch.setattr("torch.cuda.Stream", StandInStream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: decode)
    monkeypatch.setattr("torch.cuda.stream", lambda x: nullcontext(started.append(x)))
    monkeypatch.setattr("disagg.engine.arena.SideStream", lambda _: SideStream(CUDA))
    arena = DeviceArena(torch.zeros(1 << 20, dtype=torch.uint8))
    desk, prompt = Desk(pool=Pool(arena, 1 << 14)), make_prompt(300)
    desk.give(prompt, "r")
    source = ArenaSource(arena, prompt.manifest, desk.admitted().groups)
    source.stage(prompt.manifest.items)()
    assert started.pop().waited == [decode]  # the kernels that write what is offered
    sent = source.read(prompt.manifest.items)
    started.clear()
    assert source.read(prompt.manifest.items) == sent
    assert not desk.scrub()
    assert len(started) == 2
    assert not any(decode in stream.waited for stream in started)


def test_who_writes_waits_for_no_copy_but_kernels_and_later_reads_do(monkeypatch):
    """The loop that takes frames in stood still for every one of them."""
    decode, started = StandInStream(CUDA), list[StandInStream]()
    monkeypatch.setattr("torch.cuda.Stream", StandInStream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: decode)
    monkeypatch.setattr("torch.cuda.stream", lambda x: nullcontext(started.append(x)))
    monkeypatch.setattr("disagg.engine.arena.SideStream", lambda _: SideStream(CUDA))
    arena = DeviceArena(torch.zeros(1 << 12, dtype=torch.uint8))
    for _ in range(MAX_WRITES):
        arena.write([(128, b"abc")])
    arriving = started[0]
    wait = arriving.record_event().synchronize
    assert not wait.called
    assert decode.waited == MAX_WRITES * [arriving]
    arena.write([(128, b"abc")])
    assert wait.call_count == 1  # for the first of them: memory of the host is bounded
    started.clear()
    arena.read(128, 3)
    assert started[0].waited == [arriving]


@pytest.mark.parametrize(
    ("free", "taken"), [(75, 68), (10, 6)], ids=["alone", "beside others"]
)
def test_what_others_leave_of_a_gpu_is_not_all_taken(monkeypatch, free, taken):
    """An arena of all that was free left nothing to compute with."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (free << 30, 80 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 4 << 30)
    info = SimpleNamespace(context_length=1024)
    runner = SimpleNamespace(
        device=CUDA, shape=KVShape.uniform(1, 1, 64, "float16"), info=info
    )
    assert sum(measure_memory(EngineConfig(), runner)) == taken << 30


STATE = make_state_layout([("recurrent0", "float32", (64, 128, 128))])  # 4 MiB


def hybrid_on_a_cpu(layers: int) -> SimpleNamespace:
    kv = KVShape((LayerShape(1, 64),), "float32", states=(STATE,) * layers)
    return SimpleNamespace(device=torch.device("cpu"), shape=kv)


def test_the_default_arena_of_a_host_has_room_for_states(monkeypatch):
    monkeypatch.setattr("disagg.engine.arena.total_memory", lambda: 1 << 30)

    arena, _ = measure_memory(EngineConfig(max_sequences=4), hybrid_on_a_cpu(3))

    assert arena == (256 << 20) + 4 * 3 * (4 << 20)


HOSTS = [  # GiB of memory, share of a worker, GiB of its arena
    (1, 0.9, 0.25),
    (16, 0.45, 0.9),
    (64, 0.45, 3.6),
    (512, 0.9, 8),
]


@pytest.mark.parametrize(("memory", "share", "arena"), HOSTS)
def test_the_arena_of_a_cpu_follows_memory_within_limits(
    memory, share, arena, monkeypatch
):
    monkeypatch.setattr("disagg.engine.arena.total_memory", lambda: memory << 30)

    nbytes, _ = measure_memory(EngineConfig(memory_share=share), hybrid_on_a_cpu(0))

    assert nbytes == int(arena * (1 << 30))


ROWS = [
    (EngineConfig(), "cpu", 1, 64),
    (EngineConfig(), "cpu", 100, 100),
    (EngineConfig(), "cpu", 1000, 256),
    (EngineConfig(), "cuda", 1000, 64),
    (EngineConfig(max_sequences=7), "cpu", 1000, 7),
]


@pytest.mark.parametrize(("config", "device", "prompts", "rows"), ROWS)
def test_rows_follow_the_arena_of_a_cpu(config, device, prompts, rows):
    plan = parse_plan("kivi", KVShape.uniform(4, 2, 64, "float32"))
    arena_bytes = prompts * plan.nbytes(1024)

    assert max_rows(config, torch.device(device), plan, arena_bytes) == rows


def test_an_arena_for_few_states_says_how_many(caplog):
    config = EngineConfig(max_sequences=64, arena_bytes=100 << 20)

    measure_memory(config, hybrid_on_a_cpu(3))

    assert "the states of 8 sequences, 12582912 bytes each" in caplog.text
