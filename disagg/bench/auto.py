"""`disagg bench auto`: the service chooses codecs on a link that drops and returns.

Prompts one after another, between two workers with a thread each. The link has 4 times, then 1/8,
then 4 times the KV in fp16 that prefill makes a second, which is measured first. Every codec serves
all of them, then the service chooses for each. The first token shall be decoded within so many
times what a prompt takes to compute, and attention outputs be off by no more than the budget.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from disagg.bench.child import Child
from disagg.bench.compare import (
    CODECS,
    Speed,
    config_of,
    measure_speed,
    texts_of,
)
from disagg.bench.handoff import routed, started_workers, visit
from disagg.bench.result import Row, result_of, table, tell
from disagg.config import AUTO, RouterConfig
from disagg.transfer.messages import Role
from disagg.workers.dispatch import Started

PHASES = (4.0, 1 / 8, 4.0)  # of the link, times the KV that prefill makes
SHOWN = "codec both_pct deadline_pct budget_pct mean_error chosen"
NOTES = (
    "percent of requests that met the deadline, the budget, both; a request has the error of the "
    "last sampled prompt under its codec; phases: the codecs of each"
)


@dataclass(frozen=True)
class AutoOptions:
    """times: the deadline, in prompts that are computed · requests: of each phase and codec"""

    model: str | None = None
    codecs: Sequence[str] = CODECS
    requests: int = 50
    tokens: int = 512
    times: float = 4.0
    budget: float = 0.15


def measure_auto(options: AutoOptions) -> Row:
    """A row for each codec, and one for the choice among them."""
    config = config_of(options.model, options.codecs)
    with started_workers(config, Role.PREFILL, Role.DECODE) as ((prefill, _), pair):
        speed, rows = asyncio.run(_measure(options, prefill, pair))
    measured: Row = {"prefill_s": speed.prompt_s, "kv_bytes_per_s": speed.bytes_per_s}
    measured |= {"deadline_s": options.times * speed.prompt_s, "budget": options.budget}
    measured |= {"model": options.model or "packaged", "tokens": options.tokens}
    return result_of(rows, NOTES, **measured, link_times=PHASES, requests=options.requests)


async def _measure(
    options: AutoOptions, prefill: Child, pair: Sequence[Started]
) -> tuple[Speed, list[Row]]:
    speed = await measure_speed(pair, options.model, options.tokens)
    known: dict[str, float] = {}  # errors of the last sampled prompt
    cases = tell([*options.codecs, AUTO], "{}".format)
    rows = [await _serve(options, pair, prefill, speed, codec, known) for codec in cases]
    return speed, rows


async def _serve(
    options: AutoOptions,
    pair: Sequence[Started],
    prefill: Child,
    speed: Speed,
    codec: str,
    known: dict[str, float],
) -> Row:
    deadline_s = options.times * speed.prompt_s
    prompts = iter(texts_of(options.model, options.tokens, options.requests * len(PHASES)))
    phases, errors, timely = list[Counter[str]](), list[float](), list[bool]()
    router_config = RouterConfig(error_budget=options.budget, first_decode_s=deadline_s)
    async with routed(pair, router_config) as router:
        for rate in PHASES:
            prefill.ask("pace", rate * speed.bytes_per_s)
            phases.append(Counter())
            for _ in range(options.requests):
                seen, kv = await visit(router, next(prompts), codec, 2)
                known |= {x: max(off) for x, off in kv["attention_error"].items()}
                phases[-1][kv["codec"]] += 1
                timely.append(seen.latency_s <= deadline_s)
                errors.append(known[kv["codec"]])
    allowed = [error <= options.budget for error in errors]
    both = [a and b for a, b in zip(timely, allowed, strict=True)]
    percent = {"both": both, "deadline": timely, "budget": allowed}
    figures: Row = {f"{name}_pct": 100 * mean(met) for name, met in percent.items()}
    figures |= {"mean_error": mean(errors), "phases": [dict(phase) for phase in phases]}
    return {"codec": codec} | figures


def draw_auto(result: Row) -> str:
    """What people read."""

    def rows() -> Iterator[Row]:
        for row in result["rows"]:
            told = (", ".join(f"{n} {codec}" for codec, n in x.items()) for x in row["phases"])
            yield row | {"chosen": " | ".join(told)}

    return table([*rows()], SHOWN.split())
