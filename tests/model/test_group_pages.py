"""Pages that a group of ranks seals while it decodes."""

import pytest

from disagg.engine.messages import Prefill
from tests.engine.serving import answers, make_engine, request, run_until_idle
from tests.model.rank_threads import RankThreads
from tests.model.tiny import random_prompt

TOKENS = 40


@pytest.mark.parametrize("codec", ["banded", "gear", "ott"])
def test_a_page_that_ranks_seal_has_the_bytes_of_one_process(tiny, runner, codec):
    """Random numbers of a head are those of its number in the model, on each rank."""
    prompt = random_prompt(184)  # `banded` seals its first page 8 tokens later
    threads = RankThreads(str(tiny))
    alone = make_engine(runner)
    together = threads.engine()

    for engine in (alone, together):
        engine.submit(Prefill(request("a", prompt, codec, TOKENS, ignore_eos=True)))
    expected = answers(run_until_idle(alone))
    answered = answers(run_until_idle(together))

    threads.wait()
    assert len(expected["a"]) == TOKENS
    assert answered == expected
