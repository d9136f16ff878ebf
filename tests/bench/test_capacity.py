import pytest

from disagg.bench.capacity import GPUS, RAW, CapacityOptions, measure_capacity, parameters
from disagg.errors import ConfigError


def test_fewer_bytes_fit_more_sequences_and_what_is_modelled_says_so():
    codecs = (RAW, "kivi:bits=4,residual=64")
    options = CapacityOptions(memory_mb=1.0, tokens=256, codecs=codecs, most=2, steps=1)
    rows = measure_capacity(options)["rows"]
    assert len(rows) == len(codecs) * (1 + len(GPUS))
    for raw, kivi in zip(rows[::2], rows[1::2], strict=True):
        assert raw["machine"] == kivi["machine"]
        assert kivi["sequences"] > raw["sequences"] > 0
        assert raw["ratio"] == 1
    assert [row["machine"].split(",")[0] for row in rows] == ["measured"] * 2 + ["modelled"] * 4
    assert [row["measured"] for row in rows] == [1, 2, 0, 0, 0, 0]
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_the_modelled_model_has_as_manyparameters_as_its_name_says():
    assert parameters() == pytest.approx(8.03e9, rel=0.001)


def test_a_memory_that_holds_nothing_is_a_row_without_speed():
    found = measure_capacity(CapacityOptions(memory_mb=0.01, tokens=256, codecs=(RAW,)))
    assert found["rows"][0]["sequences"] == found["rows"][0]["tokens_per_s"] == 0


def test_an_unknown_model_is_refused():
    with pytest.raises(ConfigError, match="small"):
        measure_capacity(CapacityOptions(model="70b"))
