"""What the processor of this host can do."""

from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_UNITS = {"avx512_bf16", "amx_bf16"}  # names of Linux for x86


@cache
def has_bfloat16_units() -> bool:
    """Whether the processor multiplies bfloat16 itself; False where that is not known."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return False
    names = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            names = set(value.split())
            break
    return not names.isdisjoint(BFLOAT16_UNITS)
