"""What Triton makes of the launches of whole codecs for a GPU, short of running them.

Interpreted, a kernel takes any argument. Here the arguments are bound, specialised and compiled for
sm_90, on the ways that the code takes for CUDA tensors; see launches.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)  # a compiler is at work
KERNELS = {
    name
    for file in (ROOT / "kernels" / "gpu").glob("*.py")
    for name in re.findall(
        r"^@triton\.jit.*\ndef (\w+_kernel)\(", file.read_text(), re.MULTILINE
    )
}
PAIRS = {
    "heads": 1,
    "per_head": 2,
    "head_dim": 128,
}  # of columns, until more queries fill them
LATENT: dict[str, Any] = {"heads": 1, "head_dim": 48, "latent": 32, "dtype": "bfloat16"}
FEW: dict[str, dict[str, Any]] = {  # that together launch every kernel
    "kivi": {"spec": "kivi:bits=4", "sequences": 3},
    "kivi, many units": {
        "spec": "kivi:bits=4",
        "prompt": 20000,
    },  # as the largest tables have
    "alignedkv": {"spec": "alignedkv", "sequences": 3},
    "kcvt, its prompt": {"spec": "kcvt", "steps": []},
    "gear-l, its prompt": {"spec": "gear-l:bits=2", "steps": []},
    "raw": {"spec": "raw", "sequences": 3},
    "raw, longer": {"spec": "raw", "sequences": 4, "prompt": 500},
    "alignedkv, longer": {"spec": "alignedkv", "sequences": 4, "prompt": 1000},
    "kivi, longer": {"spec": "kivi:bits=4", "sequences": 16, "prompt": 1000},
    "raw, latents": {"spec": "raw", "prompt": 40, "steps": [1]} | LATENT,
}
MORE: dict[str, dict[str, Any]] = {
    "banded": {"spec": "banded", "sequences": 3},
    "banded, longer": {"spec": "banded", "sequences": 4, "prompt": 1000},
    "kivi": FEW["kivi"],
    "banded, its first page": {"spec": "banded", "prompt": 10},
    "kivi, many units": FEW["kivi, many units"],
    "kivi, replayed": {"spec": "kivi:bits=4", "sequences": 2, "steps": [1, 8, 3]},
    "kivi of pairs": {"spec": "kivi:bits=4", "steps": [1, 16]} | PAIRS,
    "kivi of pairs, longer": {"spec": "kivi:bits=4", "sequences": 4, "steps": [1, 3, 8]}
    | PAIRS,
    "fp8": {"spec": "fp8", "steps": [1, 16]} | PAIRS,
    "fp8, longer": {"spec": "fp8", "sequences": 4, "prompt": 500, "steps": [1, 1, 3]}
    | PAIRS,
}
SERVED = ["raw", "kivi", "gear-l:bits=2,backbone=kivi,group=64"]
SERVED += [
    "gear:bits=2,backbone=kivi,group=64",
    "gear:bits=4",
    "int8",
    "fp8",
    "pertoken",
]
SERVED += [
    "banded",
    "banded:bits=2,sink=0",
    "decoquant",
    "ott:rank=4,outliers=20",
    "h2o:keep=0.25",
]
WIDE = {"heads": 8, "per_head": 4, "head_dim": 128, "prompt": 2100}
MANY: dict[str, dict[str, Any]] = {
    **{
        f"{spec}, narrow": {"spec": spec, "sequences": 3}
        for spec in ("kcvt", "ott", "h2o")
    },
    **{spec: {"spec": spec} | WIDE for spec in SERVED},
    "banded, 256 channels": {"spec": "banded", "per_head": 8, "head_dim": 256},
    "kivi, more tokens at once": {"spec": "kivi", "sequences": 2, "steps": [1, 4]}
    | WIDE,
    **{
        f"{spec} of {dtype}": {
            "spec": spec,
            "dtype": dtype,
            "sequences": 2,
            "head_dim": 80,
        }
        for spec in ("raw", "int8", "alignedkv")
        for dtype in ("bfloat16", "float32")
    },
}

MANY |= {"fp8, latents": {"spec": "fp8", "sequences": 3} | LATENT}
MANY |= {
    f"{spec}, latents": {"spec": spec, "sequences": 3, "per_head": 20}
    | LATENT
    | {"head_dim": 576, "latent": 512}
    for spec in ("raw", "int8", "kivi", "pertoken", "kcvt")
}

ELSEWHERE: dict[str, dict[str, Any]] = {  # what once failed on other chips than sm_90
    "89": {"spec": "alignedkv", "head_dim": 256},
    "100": {
        "spec": "gear-l:bits=2,backbone=kivi,group=64",
        "heads": 1,
        "head_dim": 128,
    },
}


def launch(
    scenarios: dict[str, dict[str, Any]], cache: Path, **chosen: str
) -> dict[str, dict[str, Any]]:
    """The report of launches.py on each scenario."""
    chosen |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment = {
        k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"
    } | chosen
    arguments = [json.dumps(scenario) for scenario in scenarios.values()]
    command = [sys.executable, "-m", "tests.kernels.launches", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(scenarios, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(
    scope="module", params=[FEW, pytest.param(MORE, marks=pytest.mark.slow)]
)
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("triton")
    return launch(request.param, folder, DISABLE_PTXAS_OPT="1")  # half the time


def test_every_launch_binds_compiles_and_gets_its_parameters(reports):
    errors = {name: one["error"] for name, one in reports.items() if one["error"]}

    assert not errors
    assert all(one["launched"] for one in reports.values())


@pytest.mark.parametrize("reports", [FEW], indirect=True)
def test_no_kernel_is_left_out(reports):
    assert {name for one in reports.values() for name in one["launched"]} == KERNELS


def test_encoders_divide_as_their_reference_does(reports):
    approximate = {name for one in reports.values() for name in one["approximate"]}
    assert "encode_side_kernel" not in approximate


def test_longer_page_tables_and_other_batches_need_no_compiler(reports):
    for name, one in reports.items():
        assert not one["compiled"] or not name.endswith((", longer", ", replayed")), (
            name
        )


def test_every_step_attends_and_merges_in_a_launch_each(reports):
    for one in reports.values():
        steps = one["launched"].count("append_kernel")
        assert one["launched"].count("attend_kernel") == steps
        assert one["launched"].count("merge_kernel") == steps


@pytest.mark.parametrize(
    "capability", ["89", pytest.param("100", marks=pytest.mark.slow)]
)
def test_other_chips_take_what_compiles_and_fits_there(capability, tmp_path):
    chosen = {"CAPABILITY": capability, "DISABLE_PTXAS_OPT": "1"}
    (reports,) = launch(
        {capability: ELSEWHERE[capability]}, tmp_path, **chosen
    ).values()

    assert not reports["error"]
    assert reports["launched"]


@pytest.mark.slow
def test_every_launch_of_every_codec_binds_and_compiles(tmp_path):
    wrong = {
        name: one["error"]
        for name, one in launch(MANY, tmp_path).items()
        if one["error"]
    }
    assert not wrong
