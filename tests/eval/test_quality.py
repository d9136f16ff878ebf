"""Figures of `disagg eval`: paired, exact where nothing is lost, worse with fewer bits."""

import math

import pytest

from disagg.codecs.registry import codec_names
from disagg.errors import ConfigError
from disagg.eval.paged import EXACT
from disagg.eval.quality import CODECS, EvalOptions, Judge
from disagg.eval.summary import (
    costs,
    exact_perplexity,
    paired,
    perplexity_by_factor,
    summarize,
)
from tests.model.tiny import save_tiny

SPECS = (EXACT, "kivi:bits=4,residual=64", "kivi:bits=2,residual=64")
SHAPE = {"rows": 2, "prompt": 200, "score": 60, "free": 5}


@pytest.fixture(scope="module")
def judge(tiny):
    return Judge(EvalOptions(str(tiny), SPECS, **SHAPE))


@pytest.fixture(scope="module")
def rows(judge):
    return [judge.measure(case) for case in judge.cases()]


def test_exact_kv_differs_from_itself_in_nothing(rows):
    for row in rows[:: len(SPECS)]:
        assert row["codec"] == EXACT
        assert row["delta"] == row["kl"] == 0
        assert row["same"] == SHAPE["free"]
        assert row["top1"] == row["tokens"] == SHAPE["score"] - 1
        assert not any(row["errors"])


def test_fewer_bits_are_farther_from_exact(judge, rows):
    exact, four, two = summarize(rows, judge.sizes)

    assert [line["codec"] for line in (exact, four, two)] == list(SPECS)
    assert exact["kl"] < four["kl"] < two["kl"]
    assert exact["error"] < four["error"] < two["error"]
    assert four["handoff_pct"] > two["handoff_pct"] > two["answer_pct"]
    assert (four["bits"], two["bits"]) == (4.5, 2.5)


@pytest.fixture(scope="module")
def hybrid_judge(hybrid):
    return Judge(EvalOptions(str(hybrid("qwen3_5_text").info.path), SPECS, **SHAPE))


def test_of_a_hybrid_only_layers_that_attend_lose_anything(hybrid_judge):
    rows = [hybrid_judge.measure(case) for case in hybrid_judge.cases()[: len(SPECS)]]

    exact, four, two = summarize(rows, hybrid_judge.sizes)

    assert exact["kl"] == exact["error"] == 0
    assert 0 < four["kl"] < two["kl"]
    assert {len(row["errors"]) for row in rows} == {1}


def test_sizes_of_a_hybrid_are_of_its_kv(hybrid_judge):
    shape = hybrid_judge.runner.shape

    sizes = hybrid_judge.sizes("raw:dtype=fp16")

    assert sizes == {"bits": 16, "handoff_pct": 104, "answer_pct": 100.65}
    assert hybrid_judge.layers() == {
        "kv_layers": 1,
        "state_layers": 3,
        "state_bytes": shape.state_bytes,
    }


def test_rows_of_all_codecs_are_paired_with_the_same_exact_row(rows):
    for first in range(0, len(rows), len(SPECS)):
        of_all_codecs = rows[first : first + len(SPECS)]
        assert len({row["nll"] for row in of_all_codecs}) == 1
    of_one_codec = rows[:: len(SPECS)]

    assert exact_perplexity(rows) == exact_perplexity(of_one_codec)


def test_rows_are_known_by_all_options_of_their_codec(judge, rows):
    lines = summarize(rows, judge.sizes)
    assert [line["codec"] for line in lines] == list(SPECS)
    spec = "kivi:bits=2,group=64,residual=64"
    assert costs(lines)[spec] == {
        "bits": lines[2]["bits"],
        "ppl_pct": lines[2]["ppl_pct"],
        "ppl_se_pct": lines[2]["ppl_se_pct"],
        "kl": lines[2]["kl"],
    }

    other_spec = "kivi:bits=2,group=32,residual=64"
    other_rows = [{**row, "spec": other_spec} for row in rows]
    assert len(judge.cases(other_rows)) == len(rows)


def test_a_summary_has_the_mean_and_error_of_its_tokens():
    deltas = [0.5, -0.1, 0.2, 0.4]
    squares = sum(x * x for x in deltas)
    row = {"tokens": 4, "delta": sum(deltas), "delta_squares": squares}

    tokens, mean, error = paired([row, row])

    assert tokens == 8
    assert mean == pytest.approx(0.25)
    variance = sum((x - 0.25) ** 2 for x in deltas) / 4
    assert error == pytest.approx(math.sqrt(variance / 8))


def test_outliers_ruin_codecs_with_a_scale_per_token_and_no_others(tiny):
    codecs = ("int8", "fp8", "kivi:bits=4,residual=64", "banded:bits=3")
    shape = {**SHAPE, "rows": 1, "prompt": 260, "factors": (1, 256)}
    judge = Judge(EvalOptions(str(tiny), codecs, **shape))
    rows = [judge.measure(case) for case in judge.cases()]

    lines = summarize(rows, judge.sizes)
    worst = {(x["codec"], x.get("factor", 1)): x["error_max"] for x in lines}

    (plain,), (stressed,) = (x.values() for x in perplexity_by_factor(rows).values())
    assert stressed == plain
    assert worst["int8", 1] < 0.1 < 0.5 < worst["int8", 256]
    for codec in codecs[1:]:
        assert worst[codec, 256] == pytest.approx(worst[codec, 1], rel=0.05)
    assert not judge.cases(rows)


def test_every_codec_is_judged_unless_some_are_named():
    assert {spec.partition(":")[0] for spec in CODECS} == set(codec_names())


def test_of_all_codecs_those_that_hold_the_heads_are_judged(tmp_path):
    model = str(save_tiny("llama", tmp_path, head_dim=80))
    judge = Judge(EvalOptions(model, **SHAPE))
    left_out = {"banded:bits=3", "banded:bits=2", "kivi:group=32"}

    assert set(CODECS) - set(judge.codecs) == left_out
    with pytest.raises(ConfigError, match="head dim is 80"):
        Judge(EvalOptions(model, ("banded:bits=3",), **SHAPE))
