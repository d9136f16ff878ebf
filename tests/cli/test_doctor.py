"""`disagg doctor`: what it prints, and the status that it ends with."""

import json
from dataclasses import replace

import pytest

from disagg.cli.doctor import verdict
from disagg.kernels.cpu import library
from disagg.paged import doctor as room

DOCTOR = "doctor --device cpu --head-dim 64"
KIVI = "kivi:bits=2,group=64,residual=16"


def test_sound_kernels_are_reported_by_codec_and_backend(disagg):
    result = json.loads(disagg(DOCTOR, KIVI, "raw", "--json").out)

    assert result["device"] == "cpu"
    assert result["name"] == library.backend()
    assert result["sound"] is True
    kernels = [row["kernel"] for row in result["rows"]]
    assert kernels == 2 * ["encode", "append", "attend", "replay"]
    assert {row["codec"] for row in result["rows"]} == {KIVI, "raw:dtype=model"}


def test_latents_are_checked_where_a_latent_is_named(disagg):
    result = json.loads(disagg(DOCTOR, "--latent", "48", "raw", "--json").out)

    assert result["sound"] is True
    kernels = [row["kernel"] for row in result["rows"]]
    assert kernels == ["encode", "append", "attend", "replay"]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_wrong_kernel_is_exit_status_1(form, disagg, monkeypatch):
    examine = room.examine

    def examine_with_one_wrong(*arguments, **options):
        *others, last = examine(*arguments, **options)
        return [*others, replace(last, error=1.0)]

    monkeypatch.setattr(room, "examine", examine_with_one_wrong)

    out = disagg(DOCTOR, KIVI, *form, code=1).out

    if form:
        assert '"sound": false' in out
    else:
        assert out.count("WRONG") == 1


def test_the_group_of_a_codec_fits_the_head_dim(disagg):
    result = json.loads(disagg("doctor --device cpu --head-dim 96 kivi --json").out)

    codecs = {row["codec"] for row in result["rows"]}
    assert codecs == {"kivi:bits=2,group=32,residual=128"}


def test_codecs_that_the_head_dim_does_not_fit_are_left_out(disagg, monkeypatch):
    specs = []
    monkeypatch.setattr(
        room, "examine", lambda spec, *_, **options: specs.append(spec) or []
    )

    disagg("doctor --device cpu --head-dim 96")

    assert {"kivi", "raw"} <= set(specs)
    assert "banded" not in specs


def test_without_the_library_it_says_that_the_reference_serves(disagg, monkeypatch):
    monkeypatch.setattr(library, "paths", lambda: ())

    output = disagg(DOCTOR, KIVI)

    assert "no C library, the reference serves" in output.out


def test_an_unknown_codec_is_an_error(disagg):
    assert "unknown codec 'zip'" in disagg("doctor zip", code=2).err


def test_a_latent_is_smaller_than_k(disagg):
    error = disagg("doctor --device cpu --latent 128 kivi", code=2).err

    assert "a latent has 128 channels; expected 1 to 127" in error
    assert "--latent" in disagg("doctor --latent -1", code=2).err


def test_the_last_line_is_a_verdict():
    sound = room.Finding("raw", "attend", "torch", error=1e-3, bound=1e-2)
    wrong = replace(sound, kernel="append", error=1.0)

    assert verdict([sound]) == "sound: 1 of 1 kernels within their bounds"
    assert verdict([sound, wrong]) == (
        "NOT SOUND: 1 of 2 kernels within their bounds; wrong: raw append"
    )
