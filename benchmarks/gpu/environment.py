"""Step 1: device, clocks, versions, tools, and the bandwidth of copies."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from statistics import median

import torch

from benchmarks.gpu.setting import Setting
from disagg.bench.kernels import time_cpu, time_cuda
from disagg.bench.result import PACKAGES, Row, describe_machine, version_of

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}  # more than any L2 cache
HOST_BYTES = {"cuda": 256 << 20, "cpu": 1 << 22}
RUNS = {"cuda": 10, "cpu": 2}
TOOLS = ("nvcc", "ncu", "compute-sanitizer", "gcc", "nvidia-smi")
QUERY = (
    "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
)
QUERY += ",temperature.gpu,memory.total"


def rows(setting: Setting) -> Iterator[Row]:
    """Device, software, bandwidth: a row each."""
    yield {"what": "software", "versions": {x: version_of(x) for x in PACKAGES}}
    yield {
        "what": "host",
        **describe_machine(),
        "tools": {x: shutil.which(x) for x in TOOLS},
    }
    yield {"what": "device", **describe_device(setting.device)}
    yield {"what": "bandwidth", **bandwidth(setting.device)}


def describe_device(device: torch.device) -> Row:
    """The device according to torch and the driver."""
    if device.type != "cuda":
        return {"name": "stand-in", "processors": os.cpu_count()}
    about = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    output = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    )
    driver = dict(
        zip(QUERY.split(","), output.stdout.strip().split(", "), strict=False)
    )
    return {
        "name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "processors": about.multi_processor_count,
        "l2_bytes": getattr(about, "L2_cache_size", 0),
        "memory_bytes": total,
        "free_bytes": free,
        "driver": driver,
    }


def bandwidth(device: torch.device) -> Row:
    """GB/s, 1e9 bytes: of a copy within the device, read and written; to and from the
    host.
    """
    kind = device.type
    timer = time_cuda if kind == "cuda" else time_cpu
    source = torch.zeros(COPY_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (copied,) = timer([lambda: target.copy_(source)], RUNS[kind])
    nbytes = HOST_BYTES[kind]
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=kind == "cuda")
    part = target[:nbytes]
    calls = [
        lambda: part.copy_(host, non_blocking=True),
        lambda: host.copy_(part, non_blocking=True),
    ]
    to_device, from_device = timer(calls, RUNS[kind])
    return {
        "copy_gb_per_s": 2e-3 * source.numel() / copied,
        "to_device_gb_per_s": 1e-3 * nbytes / to_device,
        "from_device_gb_per_s": 1e-3 * nbytes / from_device,
    }


def copy_speed(device: torch.device) -> float:
    """GB/s that a large copy reads and writes, the middle of three."""
    return median(bandwidth(device)["copy_gb_per_s"] for _ in range(3))


def headline(rows: list[Row]) -> list[str]:
    """The device and its bandwidth."""
    by_name = {row["what"]: row for row in rows if "what" in row}
    lines = []
    if device := by_name.get("device"):
        lines.append(f"{device['name']}, {device['processors']} processors")
    if speed := by_name.get("bandwidth"):
        lines.append(
            "copy {copy_gb_per_s:,.0f} GB/s, to the device {to_device_gb_per_s:,.0f}, "
            "from it {from_device_gb_per_s:,.0f}".format_map(speed)
        )
    return lines
