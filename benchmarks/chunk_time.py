"""Time between tokens of streams while long prompts arrive at the worker that decodes them.

    python -m benchmarks.chunk_time --json --out FILE

`disagg serve --colocated` with one worker, once for each value of `engine.chunk_s`: streams decode,
and prompts arrive one by one until they are done. Only gaps while a prompt is computed count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from typer import Option

from benchmarks import command
from benchmarks.command import Dtype, Model
from benchmarks.servers import NAME, OwnEnvironment, ServerCommand, running
from benchmarks.streams import ClientEnd, Questions, gaps_beside
from disagg.bench.child import Child
from disagg.bench.result import Row, p99, progress, result_of
from disagg.bench.serving import ServeOptions
from disagg.bench.tables import table
from disagg.cli.bench import Out, show, without_none
from disagg.cli.options import Json
from disagg.config import EngineConfig

NOTES = (
    "milliseconds between tokens of streams; first_ms: to the first token of a prompt"
)
COLUMNS = ["chunk_s", "p50_ms", "p99_ms", "most_ms", "first_ms", "arrived"]


@dataclass(frozen=True)
class ChunkTimeOptions:
    """What is served.

    limits:  values of `engine.chunk_s`; None: no limit
    streams, answer: how many, with so many tokens each
    prompt, prompts: tokens of those that arrive, and how many at most
    """

    model: str = "smollm2"
    dtype: str = "auto"
    limits: Sequence[float | None] = (None, EngineConfig.chunk_s, 0.1)
    streams: int = 4
    answer: int = 200
    prompt: int = 3072
    prompts: int = 12


def measure_chunk_time(options: ChunkTimeOptions) -> Row:
    """A row for each limit."""
    questions = Questions(options.model)
    rows = [
        _measure(options, questions, limit)
        for limit in progress(options.limits, "chunk_s {}".format)
    ]
    return result_of(rows, NOTES)


def _measure(
    options: ChunkTimeOptions, questions: Questions, limit: float | None
) -> Row:
    with (
        TemporaryDirectory() as folder,
        running(_serve(options, limit, Path(folder)), Path(folder)) as server,
        Child(ClientEnd) as client,
    ):
        target = ServeOptions(server.url, NAME, ignore_eos=True)
        # the engine learns what decoding and prompts take
        client.ask("ask", target, questions.make(1, 600, 16))
        batch = questions.make(options.streams, 64, options.answer)
        long = questions.make(options.prompts, options.prompt, 1)
        streams, arrived = client.ask("ask_beside", target, batch, long)
    gaps_ms, _ = gaps_beside(streams, arrived)
    return {
        "chunk_s": limit,
        **gap_figures(gaps_ms),
        "first_ms": 1e3 * median(x.ttft_s for x in arrived),
        "arrived": len(arrived),
    }


def _serve(
    options: ChunkTimeOptions, limit: float | None, folder: Path
) -> ServerCommand:
    setting = "null" if limit is None else f"{limit:g}"
    return OwnEnvironment(folder).serve(
        f"chunk_s {setting}",
        options.model,
        options.dtype,
        *("--colocated", "--set", f"engine.chunk_s={setting}"),
    )


def gap_figures(gaps_ms: Sequence[float]) -> Row:
    """The median, the 99th percentile and the largest of gaps."""
    return {"p50_ms": median(gaps_ms), "p99_ms": p99(gaps_ms), "most_ms": max(gaps_ms)}


def draw(result: Row) -> str:
    """The result as a table."""
    return table(result["rows"], COLUMNS)


def chunk_time(
    model: Model = None,
    dtype: Dtype = None,
    streams: int | None = Option(None, min=1, help="Streams that decode."),
    answer: int | None = Option(None, min=2, help="Tokens of each stream."),
    prompts: int | None = Option(None, min=1, help="Prompts that arrive, at most."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time between tokens while long prompts arrive, by `engine.chunk_s`."""
    fields = without_none(
        model=model, dtype=dtype, streams=streams, answer=answer, prompts=prompts
    )
    show(measure_chunk_time(ChunkTimeOptions(**fields)), out, as_json, draw)


if __name__ == "__main__":
    command.main(chunk_time, "chunk_time")
