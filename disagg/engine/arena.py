"""The arena of a worker: one uint8 tensor that kernels read and a pool that hands out its pages."""

from collections.abc import Iterable, Sequence
from threading import RLock

import torch
from torch import Tensor

from disagg.page import ARENA_UNIT, RAW_TOKENS, align
from disagg.plan import RecordShape
from disagg.pool import DEFAULT_SLAB_BYTES, Arena, HostArena
from disagg.transfer.keeping import KeepingPool, Kept

RECORDS_PER_SLAB = 4  # of the largest record; fewer would waste the ends of slabs


class DeviceArena:
    """An arena in the memory of an accelerator: reads copy to the host, writes copy from it."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    @property
    def nbytes(self) -> int:
        return self._tensor.numel()

    def read(self, start: int, nbytes: int) -> memoryview:
        return self._tensor[start : start + nbytes].cpu().numpy().data

    def write(self, start: int, data: memoryview | bytes) -> None:
        host = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._tensor[start : start + len(data)] = host.to(self._tensor.device)

    def zero(self, start: int, nbytes: int) -> None:
        self._tensor[start : start + nbytes] = 0


class SharedPool(KeepingPool):
    """A pool that an engine and an io thread share: every call is atomic, bytes are not locked."""

    def __init__(self, arena: Arena, slab_bytes: int):
        super().__init__(arena, slab_bytes)
        self._lock = RLock()

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        with self._lock:
            return super().allocate(shape, count)

    def claim(self, shape: RecordShape, count: int) -> list[int]:
        with self._lock:
            return super().claim(shape, count)

    def retain(self, pages: Iterable[int]) -> None:
        with self._lock:
            super().retain(pages)

    def release(self, pages: Sequence[int]) -> None:
        with self._lock:
            super().release(pages)

    def keep(self, key: bytes, pages: Sequence[int], note: object) -> None:
        with self._lock:
            super().keep(key, pages, note)

    def take(self, keys: Sequence[bytes]) -> list[Kept]:
        with self._lock:
            return super().take(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            super().used(keys)

    def drop(self, key: bytes) -> None:
        with self._lock:
            super().drop(key)

    def free_pages(self, shape: RecordShape) -> int:
        with self._lock:
            return super().free_pages(shape)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return super().used_bytes

    def check_integrity(self) -> None:
        with self._lock:
            super().check_integrity()


def make_pool(nbytes: int, slab_bytes: int, device: torch.device) -> tuple[SharedPool, Tensor]:
    """A pool over `nbytes` of a device, and the same bytes as the tensor that kernels read."""
    tensor = torch.empty(align(nbytes, ARENA_UNIT), dtype=torch.uint8, device=device)
    on_host = device.type == "cpu"
    arena: Arena = HostArena(tensor.numpy().data) if on_host else DeviceArena(tensor)
    return SharedPool(arena, slab_bytes), tensor


def slab_bytes_for(layers: int, heads: int, head_dim: int) -> int:
    """Slabs that hold some records of any codec: the largest is about 16 exact fp32 tokens."""
    record = layers * heads * RAW_TOKENS * head_dim * 2 * 4
    return align(max(DEFAULT_SLAB_BYTES, RECORDS_PER_SLAB * record), ARENA_UNIT)
