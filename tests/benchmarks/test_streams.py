"""The benchmark of a whole service, at sizes that say nothing of speed."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from benchmarks.streams import (
    MeasuredService,
    Questions,
    StreamsOptions,
    measure_streams,
)
from disagg.bench.serving import RequestTimes, ServeOptions
from disagg.bench.tables import tables


class FakeClient:
    """A child process with prepared answers."""

    def __init__(self, *answers: Any):
        self.answers = list(answers)

    def ask(self, method: str, *arguments: Any) -> Any:
        return self.answers.pop(0)


def test_a_gap_is_beside_a_prompt_where_they_overlap() -> None:
    stream = RequestTimes(9, start_s=0.0, ttft_s=1.0, gaps_s=[1.0, 1.0, 3.0, 1.0])
    prompt = RequestTimes(9, start_s=3.5, ttft_s=0.5)
    service = MeasuredService(
        options=StreamsOptions(),
        client=FakeClient(([stream], [prompt])),  # type: ignore[arg-type]
        target=ServeOptions("", ""),
        questions=Questions(None),
    )

    row = service.beside()

    assert (row["calm_p50_ms"], row["p50_ms"], row["p99_ms"]) == (1000, 3000, 3000)
    assert (row["streams"], row["arrived"], row["first_ms"]) == (8, 1, 500)


@pytest.mark.slow
def test_a_service_is_measured_beside_a_dense_batch_and_llm() -> None:
    options = StreamsOptions(
        codecs=["raw"],
        rounds=1,
        streams=3,
        prompt=8,
        output=6,
        arriving=90,
        beside=(2, 300),
    )

    # Ray reads its environment when it is imported, which other tests of this process do
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        result = alone.submit(measure_streams, options).result()

    one, batch, mixed = result["rows"]
    assert (one["streams"], one["share"], one["served_gain"]) == (1, 1.0, 1.0)
    assert batch["share"] == pytest.approx(batch["served_gain"] / batch["dense_gain"])
    assert "-" in mixed["outputs"]
    assert result["overhead"][0]["llm_each_ms"] > 0
    assert result["beside"][0]["arrived"] > 0
    assert result["known"][0]["codec"] == "raw"
    assert "each ratio" in tables(result)
