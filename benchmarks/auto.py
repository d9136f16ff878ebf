"""How `--codec auto` reacts when a link gets slower.

    python -m benchmarks.auto --json --out FILE

Prompts go one after another over a link whose rate drops and recovers, first under each codec, then
under the codec that the service chooses per prompt. Goals: the first decoded token within a
multiple of the compute time of a prompt, and an error of attention within the budget. As in `disagg
bench compare`, the rate of the link is a multiple of the KV that prefill produces.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import TYPE_CHECKING

from typer import Option

from benchmarks import command
from disagg.bench.child import Child
from disagg.bench.result import Row, progress, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Codecs, Out, show, without_none
from disagg.cli.checks import check_codecs
from disagg.cli.options import Json, Model
from disagg.config import AUTO, RouterConfig
from disagg.transfer.messages import Role, WorkerInfo

if TYPE_CHECKING:  # imports torch: the arguments are checked before
    from disagg.bench.compare import Speed
    from disagg.bench.workers import Prompt

PHASES = (4.0, 1 / 8, 4.0)  # rates of the link, relative to the KV rate of prefill
ANSWER_TOKENS = 2
COLUMNS = ("codec", "both_pct", "deadline_pct", "budget_pct", "mean_error", "chosen")
NOTES = (
    "percent of requests that met the deadline, the budget, both; a request has the error of the "
    "last sampled prompt under its codec; phases: the codecs of each"
)


def default_codecs() -> Sequence[str]:
    """The codecs of `disagg bench compare`."""
    from disagg.bench.compare import CODECS

    return CODECS


@dataclass(frozen=True)
class AutoOptions:
    """The prompts and the goals.

    requests: per phase and codec
    times:    the deadline, in compute times of a prompt
    budget:   largest relative error of attention outputs
    """

    model: str | None = None
    codecs: Sequence[str] = field(default_factory=default_codecs)
    requests: int = 50
    tokens: int = 512
    times: float = 4.0
    budget: float = 0.15


def measure_auto(options: AutoOptions) -> Row:
    """A row for each codec, and one for the choice of the service."""
    from disagg.bench.compare import config_of, texts_of
    from disagg.bench.workers import started_workers

    num_prompts = options.requests * len(PHASES)
    prompts = texts_of(options.model, options.tokens, num_prompts)
    config = config_of(options.model, options.codecs)
    with started_workers(config, Role.PREFILL, Role.DECODE) as (children, infos):
        speed, rows = asyncio.run(_measure(options, prompts, children[0], infos))
    return result_of(
        rows,
        NOTES,
        **asdict(speed),
        deadline_s=options.times * speed.prefill_s,
        budget=options.budget,
        model=options.model or "packaged",
        tokens=options.tokens,
        link_times=PHASES,
        requests=options.requests,
    )


async def _measure(
    options: AutoOptions,
    prompts: "Sequence[Prompt]",
    prefill: Child,
    workers: Sequence[WorkerInfo],
) -> "tuple[Speed, list[Row]]":
    from disagg.bench.compare import measure_speed

    speed = await measure_speed(workers, options.model, options.tokens)
    errors = dict[str, float]()  # of the last sampled prompt, by codec
    rows = []
    for codec in progress([*options.codecs, AUTO], str):
        served = await _serve(options, prompts, prefill, workers, speed, codec, errors)
        rows.append(_row(options, speed, codec, served))
    return speed, rows


@dataclass(frozen=True)
class ServedRequest:
    """A served request: its phase, the codec of its pages, and the goals that it met."""

    phase: int
    codec: str
    seconds: float
    error: float


async def _serve(
    options: AutoOptions,
    prompts: "Sequence[Prompt]",
    prefill: Child,
    workers: Sequence[WorkerInfo],
    speed: "Speed",
    codec: str,
    errors: dict[str, float],
) -> list[ServedRequest]:
    """All phases under one codec; `errors` is brought up to date with every sampled prompt."""
    from disagg.bench.compare import kv_figures
    from disagg.bench.workers import routed, visit

    config = RouterConfig(
        error_budget=options.budget, first_decode_s=options.times * speed.prefill_s
    )
    served = []
    remaining = iter(prompts)
    async with routed(workers, config) as router:
        for phase, rate in enumerate(PHASES):
            prefill.ask("pace", rate * speed.kv_bytes_per_s)
            for _ in range(options.requests):
                prompt = next(remaining)
                times, kv = await visit(router, prompt, codec, ANSWER_TOKENS)
                kv_figures([(times, kv)])  # PeerLostError without figures
                for name, sampled in kv["attention_error"].items():
                    errors[name] = max(e for group in sampled for e in group.values())
                used = kv["codec"]
                served.append(ServedRequest(phase, used, times.e2el_s, errors[used]))
    return served


def _row(
    options: AutoOptions, speed: "Speed", codec: str, served: Sequence[ServedRequest]
) -> Row:
    deadline_s = options.times * speed.prefill_s
    timely = [x.seconds <= deadline_s for x in served]
    accurate = [x.error <= options.budget for x in served]
    both = [a and b for a, b in zip(timely, accurate, strict=True)]
    phases = [Counter[str]() for _ in PHASES]
    for request in served:
        phases[request.phase][request.codec] += 1
    return {
        "codec": codec,
        "both_pct": 100 * mean(both),
        "deadline_pct": 100 * mean(timely),
        "budget_pct": 100 * mean(accurate),
        "mean_error": mean(x.error for x in served),
        "phases": [dict(phase) for phase in phases],
    }


def draw_auto(result: Row) -> str:
    """The result as a table."""
    rows = []
    for row in result["rows"]:
        phases = []
        for codecs in row["phases"]:
            phases.append(", ".join(f"{n} {codec}" for codec, n in codecs.items()))
        rows.append({**row, "chosen": " | ".join(phases)})
    return table(rows, COLUMNS)


def auto(
    model: Model = None,
    codec: Codecs = None,
    requests: int = Option(50, min=1, help="Requests per phase and codec."),
    tokens: int = Option(512, min=256, max=8192, help="Tokens per prompt."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Codecs chosen by the service on a link that gets slower and recovers."""
    check_codecs(model, codec or (), tokens=tokens + ANSWER_TOKENS)
    fields = without_none(codecs=codec)
    options = AutoOptions(model, requests=requests, tokens=tokens, **fields)
    show(measure_auto(options), out, as_json, draw_auto)


if __name__ == "__main__":
    command.main(auto, "auto")
