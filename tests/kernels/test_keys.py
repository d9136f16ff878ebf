"""A kernel is found again in Triton's cache whatever a process ran before it."""

import os
import subprocess
import sys

import pytest

KEYS = """
import sys
from disagg.kernels import ops
from disagg.kernels.gpu import append, lowrank

ops._gpu("append")
kernels = append.append_kernel, lowrank.low_rank_kernel
first = kernels[int(sys.argv[1])].cache_key
print(*(kernel.cache_key for kernel in kernels))
"""


@pytest.mark.timeout(300)
def test_keys_do_not_depend_on_what_is_launched_first():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = {
        subprocess.run(
            [sys.executable, "-c", KEYS, first],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for first in ("0", "1")
    }

    assert len(result) == 1
