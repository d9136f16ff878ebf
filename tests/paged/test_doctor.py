"""The doctor: it finds what serves, and what is wrong with it."""

from dataclasses import replace
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from torch import Tensor

from disagg.codecs.planning import KVShape, parse_plan
from disagg.errors import ConfigError
from disagg.kernels import ops
from disagg.kernels.cpu import library
from disagg.paged import doctor as doctor_module
from disagg.paged.doctor import Finding, check_plans, examine

CPU = torch.device("cpu")
KIVI = "kivi:bits=2,group=64,residual=16"
PLAN = parse_plan(f"0:raw;1:{KIVI}", KVShape.uniform(2, 2, 64, "float32"))


@pytest.mark.parametrize(
    "spec", [KIVI, "banded:bits=3", "ott:residual=0", "h2o", "alignedkv", "raw"]
)
def test_every_kernel_of_a_codec_is_held_against_its_reference(spec):
    findings = examine(spec, 2, 64, CPU)

    assert [x.kernel for x in findings] == ["encode", "append", "attend", "replay"]
    assert all(x.sound for x in findings), findings
    _, _, attend, replay = findings
    assert attend.error > 0
    assert replay.error > 0


@pytest.mark.parametrize("spec", ["raw", "int8", "kivi:bits=4"])
def test_pages_of_latents_are_held_against_the_reference(spec):
    findings = examine(spec, 1, 96, CPU, per_head=16, latent=64)

    assert all(x.sound for x in findings), findings
    assert {x.backend for x in findings[2:]} == {library.backend()}


@pytest.mark.parametrize("path", [library.TORCH, *library.paths()])
def test_the_backend_is_the_path_that_serves(path):
    with library.forced(path):
        assert {x.backend for x in examine(KIVI, 1, 64, CPU)} == {path}


def test_kernels_that_the_reference_serves_say_torch():
    encode, append, attend, replay = examine("gear-l:bits=2", 1, 64, CPU)

    assert encode.backend == "torch"
    assert append.backend == attend.backend == replay.backend == library.backend()


def wrong_attention(q: Tensor, *arguments: object) -> Tensor:
    return torch.full_like(q, torch.nan)


def test_wrong_attention_is_found_and_refused_by_name(monkeypatch):
    monkeypatch.setattr("disagg.paged.compressed_kv.attend", wrong_attention)

    encode, _, attend, replay = examine(KIVI, 1, 64, CPU)
    assert encode.sound
    assert not attend.sound
    assert not replay.sound

    with pytest.raises(
        ConfigError, match=r"attend of kivi.* by .* is not sound on cpu"
    ):
        check_plans([replace(PLAN, groups=PLAN.groups[1:])], 4, CPU)


def test_bytes_that_differ_from_the_reference_are_found(monkeypatch):
    if not library.paths():
        pytest.skip("the reference serves; it is what it is held against")
    seal_pages = ops.cpu_encode.seal_pages

    def wrong_pages(k: Tensor, v: Tensor, *arguments: object) -> object:
        return seal_pages(k, v * 1.01, *arguments)

    monkeypatch.setattr(ops.cpu_encode, "seal_pages", wrong_pages)
    assert [x.sound for x in examine(KIVI, 1, 64, CPU)] == [False, False, True, True]


def test_a_compiler_that_fails_is_a_finding_that_says_so(monkeypatch):
    runs = [DEFAULT, RuntimeError("out of registers")]
    run = Mock(wraps=doctor_module._run, side_effect=runs)
    monkeypatch.setattr(doctor_module, "_run", run)

    (finding,) = examine(KIVI, 1, 64, CPU)
    assert not finding.sound
    assert finding.failure == "RuntimeError: out of registers"


def test_a_finding_without_a_number_is_not_sound():
    finding = Finding("raw", "attend", "torch", error=float("nan"), bound=1.0)
    assert not finding.sound


def test_plans_that_are_sound_pass():
    check_plans([PLAN], 8, CPU)


def test_plans_are_checked_with_tails_and_queries_of_their_model(monkeypatch):
    examined = Mock(wraps=examine)
    monkeypatch.setattr(doctor_module, "examine", examined)
    shape = KVShape.uniform(2, 2, 64, "bfloat16")

    check_plans([parse_plan(f"0:raw;1:{KIVI}", shape)], 14, CPU)
    assert {call.args[4:] for call in examined.call_args_list} == {("bfloat16",)}
    assert {call.kwargs["per_head"] for call in examined.call_args_list} == {7}
