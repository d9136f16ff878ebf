"""Which gaps between tokens count as beside a prompt."""

import pytest

from benchmarks.chunk_time import gap_figures
from benchmarks.streams import gaps_beside
from disagg.bench.serving import RequestTimes


def test_gaps_count_where_a_prompt_waits_for_its_first_token():
    stream = RequestTimes(8, start_s=1.0, ttft_s=1.0, gaps_s=[0.5, 0.25, 0.5])
    prompt = RequestTimes(8, start_s=2.6, ttft_s=0.1)

    beside, calm = gaps_beside([stream], [prompt])

    assert beside == [250.0]
    assert calm == [500.0, 500.0]


def test_figures_of_gaps_name_the_largest():
    assert gap_figures([1.0, 2.0, 9.0]) == pytest.approx(
        {"p50_ms": 2.0, "p99_ms": 8.86, "most_ms": 9.0}
    )
