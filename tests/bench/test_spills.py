"""Rows of kernels that compile, and of those that do not."""

from disagg.bench.machine_code import Failed
from disagg.bench.spills import compile_others
from disagg.kernels.spills import Spills


def test_a_kernel_that_does_not_compile_is_a_row_and_keeps_no_other_from_compiling():
    first, second, third = compile_others(["sm_90"], ["keep", "nothing-like-it", "key-norms"])
    assert isinstance(first, Spills)
    assert first.spill_bytes == 0
    assert isinstance(second, Failed)
    assert (second.kernel, second.target) == ("nothing-like-it", "sm_90")
    assert "no kernel" in second.reason
    assert isinstance(third, Spills)
    assert third.kernel == "key-norms"
