import torch

from disagg.engine.arena import DeviceArena, make_pool, slab_bytes_for
from disagg.plan import RecordShape

SHAPE = RecordShape("a", 1280, zeroed=True)


def test_the_pool_and_the_kernels_see_the_same_bytes():
    pool, tensor = make_pool(1 << 20, 1 << 18, torch.device("cpu"))
    (page,) = pool.allocate(SHAPE, 1)
    pool.arena.write([(page * 128 + 3, b"abc")])
    assert bytes(tensor[page * 128 : page * 128 + 7].tolist()) == b"\0\0\0abc\0"


def test_a_device_arena_copies_both_ways():
    arena = DeviceArena(torch.ones(512, dtype=torch.uint8))
    arena.write([(128, memoryview(b"abcd")), (256, b"ef")])
    arena.zero(130, 1)
    assert bytes(arena.read(127, 6)) == b"\x01ab\0d\x01"
    assert [bytes(x) for x in arena.stage([(256, 3), (128, 2)])()] == [b"ef\x01", b"ab"]
    assert arena.stage([])() == []
    assert arena.nbytes == 512


def test_slabs_hold_several_records_of_large_models():
    assert slab_bytes_for(2, 2, 64) == 1 << 20
    llama_8b_raw_page = 32 * 8 * 16 * 128 * 2 * 4
    assert slab_bytes_for(32, 8, 128) >= 4 * llama_8b_raw_page
