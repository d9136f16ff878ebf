"""Memory of this host, or of the container that limits it (cgroup v2 or v1)."""

import os
from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# the limit, what is used of it, and what of that; of v2, then of v1
LIMITS = (
    ("memory.max", "memory.current", "memory.stat"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
    ),
)
CACHES = ("inactive_file", "active_file")  # of files, dropped where memory is short


def total_memory() -> int:
    """Bytes that all processes here may use together."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, *(limit for limit, _ in _limits()))


def available_memory() -> int:
    """Bytes that processes here can still get without swapping."""
    available = total_memory()
    with suppress(OSError, StopIteration, ValueError, IndexError):
        lines = MEMINFO.read_text().splitlines()
        line = next(x for x in lines if x.startswith("MemAvailable:"))
        available = int(line.split()[1]) << 10
    rooms = (limit - used for limit, used in _limits())
    return max(0, min(available, *rooms))


def _limits() -> list[tuple[int, int]]:
    """The limit of every cgroup that has one, and what is used of it; never empty."""
    limits = [(1 << 62, 0)]
    for limit, usage, stat in LIMITS:
        with suppress(OSError, ValueError):
            limit_bytes = int((CGROUP / limit).read_text())
            used_bytes = int((CGROUP / usage).read_text())
            counts = dict(map(str.split, (CGROUP / stat).read_text().splitlines()))
            cached_bytes = sum(int(counts.get(name, 0)) for name in CACHES)
            limits.append((limit_bytes, used_bytes - cached_bytes))
    return limits
