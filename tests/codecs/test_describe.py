from pathlib import Path

import pytest
import torch

from disagg.codecs import codec_names, get_codec
from disagg.codecs.describe import describe, describe_all, measured_costs
from disagg.codecs.registry import CODECS
from disagg.paged.compressed_kv import compress

AT_MOST = {  # percent of fp16 at 8192 and 2048 tokens, tail included, head dim 128
    "kivi:bits=2,group=64,residual=64": (16.3, 18.3),
    "kivi:bits=4,group=64,residual=64": (28.7, 30.4),
    "int8": (50.8, 50.8),
    "kcvt:bits=4": (25.9, 25.9),
    "gear-l:bits=2,backbone=kivi,group=64": (19.6, 21.5),
    "gear:bits=2,backbone=kivi,group=64": (22.0, 23.8),
    "gear-l:bits=4,backbone=kcvt": (29.2, 29.2),
    "gear:bits=4,backbone=kcvt": (31.5, 31.5),
    "gear-l:bits=4": (32.0, 33.6),
    "gear:bits=4": (34.4, 35.9),
    "decoquant:bits=4,block=16": (25.9, 25.9),
    "ott:group=128": (15.7, 20.3),
    "ott": (17.2, 21.8),
    "banded:bits=2": (16.9, 20.9),
    "banded:bits=3": (20.2, 24.0),
    "fp8": (50.1, 50.1),
    "h2o:keep=0.5": (50.5, 50.5),
    "alignedkv": (100.8, 100.8),
    "pertoken:bits=4,group=64": (28.2, 28.2),
    "raw": (100.0, 100.0),
}


@pytest.mark.parametrize("spec", AT_MOST)
def test_true_stored_size_is_at_most_what_was_promised(spec: str) -> None:
    for tokens, percent in zip((8192, 2048), AT_MOST[spec], strict=True):
        assert describe(spec, 8, 128, tokens).fp16_pct <= percent


@pytest.mark.parametrize("spec", AT_MOST)
def test_the_row_says_what_a_cache_of_that_length_really_stores(spec: str) -> None:
    x = torch.randn(2, 1000, 128).half()
    stored = compress(get_codec(spec), x, x, q=x[:, -8:]).nbytes

    assert 100 * stored / (4 * x.numel()) == pytest.approx(
        describe(spec, 2, 128, 1000).fp16_pct
    )


def test_every_registered_codec_has_a_row() -> None:
    rows = describe_all(heads=8, head_dim=128, tokens=2048)

    assert [row.name for row in rows] == codec_names()

    kivi = next(row for row in rows if row.name == "kivi")

    assert (kivi.page_tokens, kivi.page_bytes, kivi.segment_bytes) == (64, 8 * 5120, 0)
    assert kivi.bits_per_element == 2.5
    assert kivi.fp16_pct < kivi.fp16_pct_mean  # 2048 is a multiple of the page


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_codec_says_in_its_docstring_what_was_measured_of_it(name: str) -> None:
    text = " ".join((type(get_codec(name)).__doc__ or "").split())
    rows = [
        x
        for spec, x in measured_costs()["codecs"].items()
        if spec.split(":")[0] == name
    ]
    for row in rows:
        assert "{bits:.2f} bits, {ppl_pct:+.1f} %, KL {kl:.4f}".format(**row) in text

    assert text.count(" %, KL ") == len(rows)
    assert ("cost: not measured" in text) == (not rows)


def test_the_table_of_the_docs_has_the_costs_that_were_measured() -> None:
    page = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
    rows = page.partition("\n## Outlier channels")[0].splitlines()
    table = {
        row.split("`")[1]: row for row in rows if row.startswith("| `") and " ± " in row
    }

    assert {
        "fp8",
        "kivi:bits=4",
        "kivi:bits=2",
        "banded:bits=2",
        "banded:bits=3",
    } == set(table)

    for spec, row in table.items():
        spec += ",residual=64" if spec.startswith("kivi") else ""
        cost = measured_costs()["codecs"][get_codec(spec).spec]
        assert (
            "| {ppl_pct:+.1f} ± {ppl_se_pct:.1f} % | {kl:.4f} |".format(**cost) in row
        )
        assert f"| {cost['bits']:.1f} |" in row
