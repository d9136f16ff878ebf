"""What the processor of this host can do."""

from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_UNITS = {"avx512_bf16", "amx_bf16"}  # names of Linux for x86


def processor_flags() -> frozenset[str]:
    """What Linux says that the processor can do; empty where that is not known."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


@cache
def has_bfloat16_units() -> bool:
    """Whether the processor multiplies bfloat16 itself; False where that is not known."""
    return not processor_flags().isdisjoint(BFLOAT16_UNITS)
