"""The figures that decide decode speed, read from machine code for an H200 without one."""

import pytest

from disagg.bench.machine_code import Failed, compile_all, compile_one
from disagg.kernels.machine_code import Row

# instructions of a thread for each element of K and V, D = 128
BUDGETS = {
    "quantized-2bit-4heads": 1.35,
    "quantized-2bit-8heads": 1.7,
    "quantized-4bit-4heads": 1.65,
    "quantized-4bit-8heads": 1.7,
    "lowrank-2bit-4heads": 1.75,
    "rows-8bit-4heads": 1.7,
    "float-8bit-4heads": 1.7,
    "raw-float16-4heads": 2.0,
    "raw-float16-8heads": 2.0,
}


@pytest.mark.timeout(300)
def test_no_loop_over_pages_exceeds_its_budget():
    rows = compile_all(BUDGETS, ["sm_90"])
    for row in rows:
        assert isinstance(row, Row), row
        assert row.per_element <= BUDGETS[row.kernel], row
        assert row.per_element > 0.5, row  # less would mean that the wrong loop was counted
        assert row.spill_bytes == 0, row
        assert row.load_bits == (64 if "lowrank" in row.kernel else 128), row  # ranks are 4
        assert row.buffers >= 2, row


def test_a_kernel_that_does_not_compile_is_a_row_that_says_why():
    row = compile_one("quantized-3bit-4heads", "sm_90")
    assert isinstance(row, Failed)
    assert "no kernel" in row.reason
