"""The figures that decide decode speed, read from machine code for an H200 without one."""

import subprocess

import pytest

from benchmarks import machine_code
from benchmarks.machine_code import LOOPS, SPECS, compile_all
from disagg.codecs import get_codec
from disagg.codecs.quantized import prompt_format
from disagg.errors import ConfigError
from disagg.kernels.gpu.attend import Chip, loops_of
from disagg.kernels.gpu.bits import PLAIN, PTX

# instructions of a thread for each element of K and V, of the codecs as they are served; D = 128
WITH_4_AND_8_HEADS = {
    "kivi-2": (1.3, 1.55),
    "kivi-4": (1.4, 1.65),
    "gear-l-2": (1.4, 1.6),
    "gear-l-4": (1.55, 1.7),
    "gear-2": (2.3, 2.8),
    "gear-4": (2.5, 3.0),
    "int8": (1.45, 1.45),
    "fp8": (1.7, 1.7),
    "raw-fp16": (2.0, 2.0),
}
BUDGETS = {
    f"{x}-{4 * i}heads": y[i - 1] for x, y in WITH_4_AND_8_HEADS.items() for i in (1, 2)
}
BUDGETS |= {"h2o-4heads": 2.0, "banded-2-4heads": 1.7, "banded-3-4heads": 1.7}
# with 256 channels; of others 8 heads are two programs
REFUSED = ("gear-2", "gear-4", "gear")
WIDE = [x for x in LOOPS if "-D256-" in x and x.split("-D256-")[0] not in REFUSED]
BUDGETS |= {name: 2.0 if name.endswith("4heads") else 4.0 for name in WIDE}
# the others take a minute each
SOON = (
    "kivi-4-4heads",
    "banded-3-4heads",
    "banded-3-D256-4heads",
    "raw-fp16-D256-4heads",
)
# one of each kind, the largest
OTHERS = (
    "encode-gear-2-v",
    "encode-kivi-4-v",
    "encode-ott-v",
    "append-gear-2",
    "low-rank",
    "merge-many",
    "plane-values",
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "names",
    [SOON, pytest.param(set(BUDGETS) - set(SOON), marks=pytest.mark.slow)],
    ids=["soon", "rest"],
)
def test_no_loop_over_pages_exceeds_its_budget(names):
    rows = compile_all(names, ["sm_90"])
    for row in rows:
        assert "reason" not in row, row
        assert row["per_element"] <= BUDGETS[row["kernel"]], row
        # less would mean that the wrong loop was counted
        assert row["per_element"] > 0.5, row
        assert row["spill_bytes"] == 0, row
        assert row["load_bits"] == 128, row
        assert row["buffers"] >= 2, row


@pytest.mark.parametrize(
    ("spec", "head_dim"),
    [
        ("gear:bits=2,backbone=kivi,sparsity=0.03125", 128),
        *((SPECS[name], 256) for name in REFUSED),
    ],
)
def test_sparse_slots_that_spill_are_refused_on_nvidia_chips(spec, head_dim):
    pages = prompt_format(get_codec(spec), head_dim)

    with pytest.raises(ValueError, match=r"4 sparse slots for each column .* 2 fit"):
        loops_of([pages], [0], 1, 4, Chip(True, PTX, PTX))
    assert len(loops_of([pages], [0], 1, 4, Chip(False, PLAIN, PLAIN))) == 1


def test_the_loop_over_whole_pages_is_counted_in_amd_code():
    search = ["v_cmp_lt_i32 v0, v1", *["global_load_dword v2, v[4:5], off"] * 6]
    whole = [*search, "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]"]
    masked = [*whole[:-1], "v_cndmask_b32 v8, v9, v10, vcc", whole[-1]]
    code = [".vgpr_count: 90", ".vgpr_spill_count: 3"]
    for i, loop in enumerate((search, whole, masked)):
        code += [
            f".LBB0_{i}:  ; a loop",
            *loop,
            "s_add_i32 s0, s0, 1",
            f"s_cbranch_scc1 .LBB0_{i}",
        ]

    assembly = machine_code.read_amdgcn("\n".join(code))

    assert machine_code.over_pages(assembly.loops, 1) == whole
    assert assembly.registers == 90
    assert assembly.spilled == 12


def test_a_loop_that_does_not_compile_is_a_row_that_says_why(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "ptxas is not there\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    failed = {
        "kernel": "kivi-2-4heads",
        "target": "sm_90",
        "reason": "ptxas is not there",
    }

    assert compile_all(["kivi-2-4heads"], ["sm_90"]) == [failed]


def test_machine_code_that_cannot_be_had_is_a_row_that_says_why(monkeypatch):
    failed = {"kernel": "kivi-2-4heads", "target": "sm_90", "reason": "no compiler"}
    monkeypatch.setattr(machine_code, "compile_all", lambda *_: [failed])

    result = machine_code.read_machine_code()

    assert result["rows"] == result["others"] == [failed]


def test_an_unknown_target_is_an_error_that_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown target 'sm_91'; known: gfx942, .*sm_90"
    ):
        machine_code.read_machine_code(["sm_91"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_kernels_fit_their_registers_if_one_fails():
    names = [*OTHERS[:-1], "nothing-like-it", OTHERS[-1]]
    *rows, wrong, behind = compile_all(names, ["sm_90"])

    assert (wrong["kernel"], wrong["target"]) == ("nothing-like-it", "sm_90")
    assert "no kernel" in wrong["reason"]

    for row in (*rows, behind):
        assert "reason" not in row, row
        assert row["spill_bytes"] == 0, row
        assert 16 < row["registers"] <= 255, row
        assert row["shared_bytes"] <= 99 << 10, row
        assert row["instructions"] > 100, row

    assert [row["kernel"] for row in (*rows, behind)] == list(OTHERS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_256_channels_no_other_kernel_spills():
    wide = [name for name in machine_code.OTHERS if name.endswith("-D256")]
    for row in compile_all(wide, ["sm_90"]):
        assert row["spill_bytes"] == 0, row


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kernel_of_latents_spills():
    for row in compile_all(machine_code.LATENTS, ["sm_90"]):
        assert "reason" not in row, row
        assert row["spill_bytes"] == 0, row
        assert row["shared_bytes"] <= 227 << 10, row
