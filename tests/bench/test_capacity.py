"""The sequences that fit in a memory, at sizes that say nothing of speed."""

import pytest

from disagg.bench.capacity import (
    GPUS,
    CapacityOptions,
    measure_capacity,
    parameters,
)

CODECS = ("raw:dtype=fp16", "kivi:bits=4,residual=64")


def test_fewer_bytes_fit_more_sequences_and_modelled_rows_say_so():
    options = CapacityOptions(memory_mb=1.0, tokens=256, codecs=CODECS, most=2, steps=1)

    rows = measure_capacity(options)["rows"]

    assert len(rows) == len(CODECS) * (1 + len(GPUS))
    for raw, kivi in zip(rows[::2], rows[1::2], strict=True):
        assert raw["machine"] == kivi["machine"]
        assert kivi["sequences"] > raw["sequences"] > 0
        assert raw["ratio"] == 1
    kinds = [row["machine"].split(",")[0] for row in rows]
    assert kinds == ["measured"] * 2 + ["modelled"] * 4
    assert [row["measured"] for row in rows] == [1, 2, 0, 0, 0, 0]
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_the_modelled_8b_has_eight_billion_parameters():
    assert parameters() == pytest.approx(8.03e9, rel=0.001)


def test_a_codec_that_fits_nowhere_is_a_row_without_speed():
    options = CapacityOptions(memory_mb=0.3, tokens=256, codecs=CODECS, most=1, steps=1)

    raw, kivi, *_ = measure_capacity(options)["rows"]

    assert (raw["sequences"], raw["tokens_per_s"], kivi["sequences"]) == (0, 0, 1)
    assert "ratio" not in kivi
