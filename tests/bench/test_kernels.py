"""The kernel benchmark, at sizes that say nothing of speed: what it runs and reports."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from disagg.bench import kernels
from disagg.bench.inputs import StepShape, make_layer
from disagg.bench.kernels import OTHER_HEADS, SHAPES, SPECS, measure_encode
from disagg.codecs import codec_names
from disagg.errors import ConfigError
from disagg.kernels.cpu import library
from disagg.page import Kind

CPU = torch.device("cpu")


@pytest.mark.parametrize("spec", SPECS)
def test_repeated_pages_are_attended_as_the_tokens_they_stand_for(spec):
    layer = make_layer(spec, StepShape(2, 4096, heads=1, per_head=3, head_dim=64), CPU)
    assert layer.error() < layer.codec.attend_error
    wrong = layer.exact().roll(1, 2)
    assert layer.error() < float((wrong - layer.exact()).norm() / wrong.norm())
    assert torch.equal(layer.layer_call()(), layer.attend()[:, 0])


def test_every_codec_is_measured():
    assert {spec.partition(":")[0] for spec in SPECS} == set(codec_names())


def test_kept_tokens_are_in_the_side_record_of_a_sequence_and_in_no_page():
    spec = "ott:outliers=20,group=64"
    layer = make_layer(spec, StepShape(3, 4096, heads=2, per_head=2, head_dim=64), CPU)
    assert (layer.counts == 1).sum(1).tolist() == [20, 20]
    assert (layer.counts == 2).sum(1).tolist() == [2028, 2028]
    _, kept = layer.tables
    assert kept.sides is not None
    assert kept.pages.shape == (3, 2)
    without = replace(layer, tables=layer.tables[:1])
    assert layer.error() < layer.codec.attend_error < 1e-3 < without.error()


def test_a_codec_that_drops_tokens_is_held_against_those_it_keeps():
    layer = make_layer("h2o:keep=0.25", StepShape(2, 4096, heads=2, per_head=2, head_dim=64), CPU)
    assert (layer.counts == 2).sum(1).tolist() == [512, 512]
    assert (layer.counts == 0).sum(1).tolist() == [1536, 1536]
    everything = replace(layer, counts=torch.ones_like(layer.counts))
    assert layer.error() < 1e-5 < 0.1 < everything.error()


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_that_a_sequence_of_the_shape_stores(spec):
    shape = StepShape(3, 4096, heads=2, per_head=1, head_dim=64)
    layer = make_layer(spec, shape, CPU)
    group = layer.group
    tokens = shape.tokens + group.sink + group.residual
    held = group.inventory(tokens)
    held[Kind.RAW] -= -(-(tokens - group.sealed(tokens)) // 16)
    held[Kind.SIDE] *= any(table.sides is not None for table in layer.tables)
    sizes = [n * group.layer_bytes(group.layout(kind)) for kind, n in held.items() if n]
    assert layer.nbytes == 3 * sum(sizes)


def test_a_row_of_the_cpu_says_what_it_was_compared_with(monkeypatch):
    monkeypatch.setattr(kernels, "DTYPES", {"fp32": torch.float32})  # each takes a process
    shape = StepShape(1, 192, heads=2, per_head=3, head_dim=64)
    result = kernels.run(kernels.KernelOptions(runs=1, specs=["int8"], shapes=[shape]))
    (row,) = result["rows"]
    assert row["codec"] == "int8"
    assert row["baseline"] == "sdpa fp32"
    assert row["ratio"] == row["baseline_microseconds"] / row["microseconds"]


def test_a_cpu_is_asked_about_other_heads_and_every_path_that_it_can_run():
    cases = kernels.cases_of(kernels.KernelOptions(), CPU)
    paths = set(library.paths()) or {library.TORCH}
    assert {path for _, _, path in cases} == paths
    sizes = {(shape.name, shape.per_head, shape.head_dim) for _, shape, _ in cases}
    assert sizes == {(x, *y) for x in ("1x8192", "8x2048") for y in ((4, 128), *OTHER_HEADS)}
    assert len(set(cases)) == len(cases)


def test_a_dtype_that_ends_the_process_is_no_baseline(monkeypatch):
    monkeypatch.setitem(kernels.DTYPES, "fp8", torch.float8_e4m3fn)
    assert kernels.is_runnable("fp32")
    assert not kernels.is_runnable("fp8")


def test_machine_code_that_cannot_be_had_is_a_row_that_says_why(monkeypatch):
    failed = {"kernel": "kivi-2-4heads", "target": "sm_90", "reason": "no compiler"}
    monkeypatch.setattr(kernels, "compile_all", lambda **options: [failed])
    monkeypatch.setattr(kernels, "compile_others", lambda **options: [failed])
    result = kernels.run(kernels.KernelOptions(machine_code=True))
    assert result["rows"][0]["reason"] == "no compiler"
    assert result["others"][0]["reason"] == "no compiler"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_names_the_way_out():
    with pytest.raises(ConfigError, match="--machine-code"):
        kernels.run(kernels.KernelOptions(device="cuda"))


@pytest.mark.parametrize("device", ["zz", "cuda:99", "mps", ""])
def test_a_device_that_is_unknown_is_refused_by_name(device):
    with pytest.raises(ConfigError, match=r"known: cpu, cuda"):
        kernels.run(kernels.KernelOptions(device=device))


def test_a_target_that_is_unknown_is_refused_before_anything_is_compiled():
    with pytest.raises(ConfigError, match=r"unknown target 'sm_91'; known: gfx942, .*sm_90"):
        kernels.run(kernels.KernelOptions(machine_code=True, targets=["sm_91"]))


def test_kernels_are_measured_where_there_is_no_ray_and_no_grpc():
    missing = ("ray", "grpc", "google", "fastapi", "pydantic", "typer", "transformers")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from disagg.bench import kernels, result
from disagg.bench.inputs import StepShape
shape = StepShape(1, 64, heads=1, per_head=1, head_dim=64)
result.PACKAGES += ("no-such-package",)
kernels.DTYPES = dict([*kernels.DTYPES.items()][:1])
found = kernels.run(kernels.KernelOptions(runs=1, specs=["kivi"], shapes=[shape]))
assert found["versions"]["no-such-package"] == "none"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_shapes_of_a_gpu_go_from_one_short_prompt_to_many_long_ones():
    assert {shape.name for shape in SHAPES["cuda"]} >= {"1x4096", "1x131072", "32x8192", "64x4096"}
    assert all((x.heads, x.per_head, x.head_dim) == (8, 4, 128) for x in SHAPES["cuda"])


def test_encoding_is_measured_in_copies_of_its_input():
    rows = measure_encode(["kivi:bits=2", "ott", "h2o"], CPU, runs=1, tokens=128)
    assert [row["codec"].split(":")[0] for row in rows] == ["kivi", "ott", "h2o"]
    assert all(row["copies"] > 0 for row in rows)
