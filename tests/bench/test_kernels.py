"""The kernel benchmark, at sizes that say nothing of speed: what it runs and reports."""

import json
import subprocess
import sys

import pytest
import torch

from disagg.bench import kernels
from disagg.bench.inputs import StepShape, make_layer
from disagg.bench.kernels import OTHER_HEADS, SPECS
from disagg.codecs import codec_names
from disagg.errors import ConfigError
from disagg.kernels.cpu import library
from disagg.kv.page import Kind

CPU = torch.device("cpu")


@pytest.mark.parametrize("spec", SPECS)
def test_attention_on_pages_equals_that_on_their_decoded_tokens(spec):
    layer = make_layer(spec, StepShape(2, 4096, heads=1, per_head=3, head_dim=64), CPU)

    assert layer.error() < layer.codec.attend_error

    wrong = layer.exact().roll(1, 2)

    assert layer.error() < float((wrong - layer.exact()).norm() / wrong.norm())
    assert torch.equal(layer.layer_call()(), layer.attend()[:, 0])


def test_every_codec_is_measured():
    assert {spec.partition(":")[0] for spec in SPECS} == set(codec_names())


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_that_a_sequence_of_the_shape_stores(spec):
    shape = StepShape(3, 4096, heads=2, per_head=1, head_dim=64)
    layer = make_layer(spec, shape, CPU)
    group = layer.group
    tokens = shape.tokens + group.sink + group.residual
    records = group.inventory(tokens)
    records[Kind.RAW] -= -(-(tokens - group.sealed(tokens)) // 16)
    records[Kind.SIDE] *= any(table.sides is not None for table in layer.tables)

    sizes = [
        n * group.layer_bytes(group.layout(kind)) for kind, n in records.items() if n
    ]

    assert layer.nbytes == 3 * sum(sizes)


def test_a_cpu_runs_its_own_shapes_on_every_available_path():
    cases = kernels.cases_of(kernels.KernelOptions(), CPU)
    paths = set(library.paths()) or {library.TORCH}

    assert {path for _, _, path in cases} == paths

    sizes = {(shape.name, shape.per_head, shape.head_dim) for _, shape, _ in cases}

    assert sizes == {
        (x, *y) for x in ("1x8192", "8x2048") for y in ((4, 128), *OTHER_HEADS)
    }
    assert len(set(cases)) == len(cases)


def test_a_dtype_that_ends_the_process_is_no_baseline(monkeypatch):
    monkeypatch.setitem(kernels.DTYPES, "fp8", torch.float8_e4m3fn)

    assert kernels.is_runnable("fp32")
    assert not kernels.is_runnable("fp8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_baseline_is_compiled_once_for_all_codecs_of_a_shape(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: object())
    kernels.compiled_flex.cache_clear()

    one, other = StepShape(1, 64), StepShape(2, 64)

    assert kernels.compiled_flex(one) is kernels.compiled_flex(StepShape(1, 64))
    assert kernels.compiled_flex(one) is not kernels.compiled_flex(other)

    kernels.compiled_flex.cache_clear()


def test_a_missing_gpu_is_an_error_that_suggests_a_way_out():
    with pytest.raises(ConfigError, match="machine_code"):
        kernels.run(kernels.KernelOptions(device="cuda"))


def test_kernels_are_measured_where_there_is_no_ray_and_no_grpc():
    """And each row says what it was compared with."""
    missing = ("ray", "grpc", "google", "fastapi", "pydantic", "typer", "transformers")
    code = f"""
import json, sys
sys.modules.update(dict.fromkeys({missing!r}))
from disagg.bench import kernels, result
from disagg.bench.inputs import StepShape
shape = StepShape(1, 192, heads=2, per_head=3, head_dim=64)
result.PACKAGES += ("no-such-package",)
kernels.DTYPES = dict([*kernels.DTYPES.items()][:1])
options = kernels.KernelOptions(runs=1, specs=["int8", "kivi"], shapes=[shape])
print(json.dumps(kernels.run(options)))
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )

    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    versions = result["versions"]
    assert versions["no-such-package"] == "none" != versions["torch"]
    assert names_of(result["rows"]) == names_of(result["encode"]) == ["int8", "kivi"]
    (baseline_us,) = {row["baseline_microseconds"] for row in result["rows"]}
    for row in result["rows"]:
        assert row["baseline"] == "sdpa fp32"
        assert row["ratio"] == baseline_us / row["microseconds"]
    assert all(row["copies"] > 0 for row in result["encode"])


def names_of(rows):
    """Codecs without their parameters."""
    return [row["codec"].partition(":")[0] for row in rows]
