"""Warm-up on a GPU: compile and record the decode steps of the listed codecs before requests come.

It serves made-up prompts; where the config has drafts, once more with a draft in every step. Triton
keeps compiled kernels on disk, for the next start. Steps are recorded over page tables of every
size that the model's context needs, and so launch both forms of the kernel that merges partial
results. Later requests record nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence

from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.kv.plan import Plan
from disagg.model.runner import Runner

PROMPT_PAGES = (0, 1, 3)  # sealed pages of a prompt; its answer then seals one more
STEPS = 4  # beyond the one that seals
REPLAYED = (
    18  # emitted tokens of the first request: one seals, the others are fed at once
)

log = logging.getLogger(__name__)


def warm_up(
    engine: Engine,
    runner: Runner,
    specs: Sequence[str],
    rows: int,
    report: Callable[[str], None],
) -> None:
    """Serve `rows` prompts of each codec that end one by one, so that every batch size occurs.

    report: called with a line of progress; the first warm-up takes minutes
    Raises the error of the first request that fails.
    """
    assert runner.graphs is not None, "no decode graphs to record into"
    context = runner.info.context_length
    runner.graphs.record_sizes(context)
    own_lookup = engine.lookup
    lookups = [own_lookup.without_drafts()]
    if own_lookup.most:
        lookups.append(own_lookup.fixed())
    for number, spec in enumerate(specs, 1):
        start = time.monotonic()
        report(
            f"compiling and recording steps of {spec}, {number} of {len(specs)} codecs"
        )
        for lookup in lookups:
            engine.lookup = lookup
            for prompt_len in _prompt_lengths(engine.plan(spec), context):
                _serve(engine, spec, prompt_len, rows)
        log.info(
            "%d of %d: compiled and recorded for %s, %.1f s",
            number,
            len(specs),
            spec,
            time.monotonic() - start,
        )
    runner.graphs.record_sizes(0)
    engine.lookup = own_lookup
    engine.counts.clear()


def _serve(engine: Engine, spec: str, prompt_len: int, rows: int) -> None:
    """Serve `rows` prompts; each answer is two tokens shorter than the one before."""
    for row in range(rows):
        emitted = (0,) * REPLAYED if row == 0 else ()
        params = SamplingParams(
            max_tokens=STEPS + 2 * (rows - row) + len(emitted),
            ignore_eos=True,
        )
        request = Request(str(row), (row % 2,) * prompt_len, params, spec)
        engine.submit(Prefill(request, emitted=emitted))
    while not engine.idle:
        for failed in engine.step().failed:
            raise failed.error


def _prompt_lengths(plan: Plan, context: int) -> list[int]:
    """Lengths of prompts whose answers soon seal a page of each layer group."""
    lengths = set()
    for group in plan.paged:
        for pages in PROMPT_PAGES:
            tokens = (pages + 1) * group.page.tokens
            length = group.sink + group.residual + tokens - 2
            lengths.add(min(length, context - 1))
    return sorted(lengths)
