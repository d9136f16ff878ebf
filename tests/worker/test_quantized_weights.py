"""Workers whose weights are rounded: they hand off to each other, and to no others."""

import logging
from unittest.mock import patch

import pytest

from disagg.config import Config, ModelConfig
from disagg.engine.sequence import SamplingParams
from disagg.errors import LayoutError
from disagg.llm import LLM
from disagg.model.quantized_linear import LEAST_NUMBERS, usable_weights
from disagg.model.runner import Runner
from tests.worker.pairs import paired

PART = "int4 in 24 of 25 linear layers"
needs_units = pytest.mark.skipif(
    "int4" not in usable_weights("cpu", "float32"),
    reason="this processor has no units for int4",
)


@pytest.fixture(scope="module")
def rounded():
    """Runners of the packaged model, with all layers but the head in int4."""
    with patch.dict(LEAST_NUMBERS, int4=0, int8=0):
        yield [Runner.load(weights="int4") for _ in range(2)]


@needs_units
async def test_two_workers_with_int4_weights_answer_like_one(rounded, story):
    config = Config(model=ModelConfig(weights="int4"))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (expected,) = LLM(codec="raw", weights="int4").generate([story], params)

    async with paired(rounded, config) as home:
        tokens, _ = await home.complete(story, "raw")

    assert tuple(tokens) == expected.tokens


@needs_units
async def test_workers_with_other_weights_are_refused(rounded, runners, story):
    async with paired([rounded[0], runners[0]]) as home:
        with pytest.raises(LayoutError, match="model"):
            await home.complete(story, "raw")


@needs_units
async def test_log_and_status_name_the_weights(rounded, caplog):
    caplog.set_level(logging.INFO)
    config = Config(model=ModelConfig(weights="int4"))

    async with paired(rounded, config) as home:
        status = await home.workers["d"].service.status()

    assert status.info["weights"].startswith(PART)
    assert f"computes in float32, weights {PART}" in caplog.text
