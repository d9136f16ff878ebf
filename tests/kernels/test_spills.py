"""The kernels beside attention on codes compile for an H200 without one, and keep to registers."""

import json
import os
import subprocess
import sys

import pytest

KERNELS = (
    "encode-sparse-2bit-v",
    "segment-scales-sparse",
    "low-rank",
    "compete",
    "attend-kept",
    "merge-many",
    "aligned-values",
)


@pytest.mark.timeout(300)
def test_kernels_compile_for_a_gpu_that_is_not_there_and_spill_nothing():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "disagg.kernels.spills", "sm_90", *KERNELS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["kernel"] for row in rows] == list(KERNELS)
    for row in rows:
        assert row["spill_bytes"] == 0, row
        assert 16 < row["registers"] <= 255, row
        assert row["shared_bytes"] <= 99 << 10, row
        assert row["instructions"] > 100, row
