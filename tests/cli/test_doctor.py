"""`disagg doctor`: what it prints, and the status that it ends with."""

import json
from dataclasses import replace

import pytest

from disagg.cli.doctor import verdict
from disagg.kernels.cpu import library
from disagg.paged import doctor as room

DOCTOR = "doctor --device cpu --head-dim 64"
KIVI = "kivi:bits=2,group=64,residual=16"


def test_sound_kernels_are_told_by_codec_and_backend(disagg):
    result = json.loads(disagg(DOCTOR, KIVI, "raw", "--json").out)
    assert (result["device"], result["name"], result["sound"]) == (
        "cpu",
        library.backend(),
        True,
    )
    assert [row["kernel"] for row in result["rows"]] == 2 * [
        "encode",
        "append",
        "attend",
        "replay",
    ]
    assert {row["codec"] for row in result["rows"]} == {KIVI, "raw:dtype=model"}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_wrong_kernel_is_exit_status_1(form, disagg, monkeypatch):
    true = room.examine

    def examine(*values):
        *others, last = true(*values)
        return [*others, replace(last, error=1.0)]

    monkeypatch.setattr(room, "examine", examine)
    out = disagg(DOCTOR, KIVI, *form, code=1).out
    assert '"sound": false' in out if form else out.count("WRONG") == 1


def test_groups_and_codecs_are_those_of_the_head_dim(disagg, monkeypatch):
    result = json.loads(disagg("doctor --device cpu --head-dim 96 kivi --json").out)
    assert {row["codec"] for row in result["rows"]} == {
        "kivi:bits=2,group=32,residual=128"
    }
    request_body = []
    monkeypatch.setattr(
        room, "examine", lambda spec, *_: request_body.append(spec) or []
    )
    disagg("doctor --device cpu --head-dim 96")
    assert {"kivi", "raw"} <= set(request_body)
    assert "banded" not in request_body


def test_without_the_library_the_reference_serves_and_that_is_said(disagg, monkeypatch):
    monkeypatch.setattr(library, "paths", lambda: ())
    assert "no C library, the reference serves" in disagg(DOCTOR, KIVI).out


def test_a_codec_nobody_knows_is_an_error(disagg):
    assert "unknown codec 'zip'" in disagg("doctor zip", code=2).err


def test_the_last_line_is_a_verdict():
    sound = room.Finding("raw", "attend", "torch", error=1e-3, bound=1e-2)
    wrong = replace(sound, kernel="append", error=1.0)

    assert verdict([sound]) == "sound: 1 of 1 kernels within their bounds"
    assert verdict([sound, wrong]) == (
        "NOT SOUND: 1 of 2 kernels within their bounds; wrong: raw append"
    )
