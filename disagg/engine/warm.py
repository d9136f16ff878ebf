"""Before the first request on a GPU: what decode steps of the listed codecs run is compiled and
recorded, by serving made-up prompts. Triton keeps what it compiled on disk, for the next start.

A step of these prompts is recorded over page tables of every size that the model's context needs,
and so launches both forms of the kernel that merges partial results. Requests record nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence

from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.kv.plan import Plan
from disagg.model.runner import Runner

PAGES = (0, 1, 3)  # of a prompt; each then seals one more
STEPS = 4  # beyond the one that seals
REPLAYED = 18  # tokens known of the first answer: one seals, the others are fed at once

log = logging.getLogger(__name__)


def warm_up(
    engine: Engine,
    runner: Runner,
    specs: Sequence[str],
    rows: int,
    tell: Callable[[str], None],
) -> None:
    """Serve `rows` prompts of each codec that end one by one, so that every size of batch occurs.

    tell: is told what goes on, in words: the first time it takes minutes
    Raises what a request that failed here ended with.
    """
    assert runner.graphs is not None, "there is nothing to record with"
    context = runner.info.context_length
    runner.graphs.record_sizes(context)
    for number, spec in enumerate(specs, 1):
        began = time.monotonic()
        tell(
            f"compiling and recording steps of {spec}, {number} of {len(specs)} codecs"
        )
        for tokens in _lengths(engine.plan(spec), context):
            for row in range(rows):
                known = () if row else (0,) * REPLAYED
                most = STEPS + 2 * (rows - row) + len(known)
                params = SamplingParams(max_tokens=most, ignore_eos=True)
                request = Request(str(row), (row % 2,) * tokens, params, spec)
                engine.submit(Prefill(request, emitted=known))
            while not engine.idle:
                for failed in engine.step().failed:
                    raise failed.error
        took = time.monotonic() - began
        log.info(
            "%d of %d: compiled and recorded for %s, %.1f s",
            number,
            len(specs),
            spec,
            took,
        )
    runner.graphs.record_sizes(0)
    engine.counts.clear()


def _lengths(plan: Plan, context: int) -> list[int]:
    """Prompts after which an answer soon seals a page of each layer group."""
    found = {
        group.sink + group.residual + (pages + 1) * group.page.tokens - 2
        for group in plan.groups
        for pages in PAGES
    }
    return sorted({min(tokens, context - 1) for tokens in found})
