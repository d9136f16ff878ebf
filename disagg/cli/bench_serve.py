"""`disagg bench serve`: the flags of `vllm bench serve` that say something of a server."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from disagg.cli import options
from disagg.cli.output import print_json
from disagg.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from disagg.model.tokenizer import Tokenizer

Datasets = Literal["random", "sharegpt", "azure", "mooncake"]
Length = Annotated[
    int | None, Option(min=1, help="Tokens of each request; 1024 and 128.")
]
LENGTHS = "input_len", "output_len", "range_ratio", "prefix_len"


def serve(
    backend: Literal["openai", "openai-chat"] = Option(
        "openai", help="Completions or chat."
    ),
    base_url: str = Option(
        "http://127.0.0.1:8000", help="Of the server, without the path."
    ),
    endpoint: str | None = Option(None, help="The path, if not that of the backend."),
    model: str | None = Option(None, help="As the server calls it; its first one."),
    tokenizer: str | None = Option(None, help="Folder or name; what the server says."),
    dataset_name: Datasets = Option("random", help="Where prompts are from."),
    dataset_path: Path | None = Option(None, help="The file of all others but random."),
    num_prompts: int = Option(1000, min=1, help="Requests."),
    random_input_len: Length = None,
    random_output_len: Length = None,
    random_range_ratio: float | None = Option(
        None, min=0, max=0.99, help="Lengths differ by up to this share; 0."
    ),
    random_prefix_len: int | None = Option(
        None, min=0, help="Tokens that all begin with; 0."
    ),
    max_concurrency: int | None = Option(
        None, min=1, help="Requests on the way at once."
    ),
    request_rate: float = Option(float("inf"), min=1e-6, help="Requests a second."),
    burstiness: float = Option(1.0, min=1e-6, help="1: Poisson; less: in bursts."),
    self_timed: bool = Option(False, help="Requests leave when the trace says."),
    ignore_eos: bool = Option(
        False, "--ignore-eos", help="Go on behind the end of the text."
    ),
    temperature: float | None = Option(None, min=0, help="Else the server's."),
    goodput: list[str] | None = Option(
        None, help='Limits in ms, "ttft:500 tpot:50"; may be repeated.'
    ),
    percentile_metrics: str = Option(
        "ttft,tpot,itl", help="Of ttft, tpot, itl and e2el."
    ),
    metric_percentiles: str = Option("99", help="25,50,99."),
    seed: int = Option(0, min=0),
    save_result: bool = Option(False, "--save-result", help="Write a JSON file."),
    save_detailed: bool = Option(
        False, "--save-detailed", help="With every request in it."
    ),
    result_dir: Path = Option(Path(), help="Where it is written."),
    result_filename: str | None = Option(None, help="Its name."),
    as_json: options.Json = False,
) -> None:
    """Load on any OpenAI server: the flags, table and JSON of `vllm bench serve`."""
    saved = save_result or save_detailed
    options.refuse_idle(
        not saved, "without --save-result", result_filename=result_filename
    )
    made, fast = dataset_name == "random", request_rate == float("inf")
    of_files = {"dataset_path": dataset_path, "self_timed": self_timed}
    options.refuse_idle(made, "with random prompts", **of_files)
    lengths = (
        random_input_len,
        random_output_len,
        random_range_ratio,
        random_prefix_len,
    )
    given = _given_lengths(dataset_name, *lengths)
    options.refuse_idle(
        self_timed and not fast, "with --self-timed", request_rate=request_rate
    )
    options.refuse_idle(fast, "without --request-rate", burstiness=burstiness != 1)
    options.writable(result_dir / (result_filename or backend) if saved else None)
    how = (backend, endpoint, max_concurrency, request_rate, burstiness, self_timed)
    what = (ignore_eos, temperature, seed, read_limits(goodput or []))
    told = (percentile_metrics.split(","), read_percentiles(metric_percentiles))
    from disagg.bench import serving

    base_url = base_url.rstrip("/").removesuffix("/v1")
    said = model and tokenizer and (model, tokenizer)
    name, root = said or serving.find_model(base_url, model)
    asked = serving.ServeOptions(base_url, name, *how, *what, *told)
    wanted = serving.WorkloadOptions(
        dataset_name, dataset_path, num_prompts, seed=seed, **given
    )
    visits = serving.make_visits(wanted, load_tokenizer(tokenizer or root))
    found = serving.measure_serving(asked, visits, tokenizer or root)
    stem = f"{backend}-{request_rate:g}qps-{Path(name).name}-{found['date']}.json"
    file = result_dir / (result_filename or stem) if saved else None
    _tell(found, file, save_detailed, as_json)


def _given_lengths(dataset: str, *lengths: float | None) -> dict[str, Any]:
    """Of LENGTHS, what was given; ConfigError where the prompts of a data set have lengths."""
    given = {name: x for name, x in zip(LENGTHS, lengths, strict=True) if x is not None}
    named = dict.fromkeys((f"random_{name}" for name in given), True)
    options.refuse_idle(dataset != "random", f"with prompts of {dataset}", **named)
    return given


def load_tokenizer(ref: str) -> "Tokenizer":
    """ModelError that names the option where a server found its model in a place of its own."""
    from disagg.model.tokenizer import Tokenizer

    try:
        return Tokenizer.load(ref)
    except ModelError as error:
        raise ModelError(
            f"{error}; --tokenizer FOLDER names one that is here"
        ) from error


def _tell(
    found: dict[str, Any], file: Path | None, detailed: bool, as_json: bool
) -> None:
    """Write and print a result; status 1 if every request failed."""
    from disagg.bench.result import write
    from disagg.bench.serving import DETAILS, draw_serving

    shown = found if detailed else {x: y for x, y in found.items() if x not in DETAILS}
    if file is not None:
        write(shown, file)
    for error in list(dict.fromkeys(filter(None, found["errors"])))[:10]:
        typer.echo(f"a request failed: {error}", err=True)
    if as_json:
        print_json(shown)
    else:
        print(draw_serving(found))
    if not found["completed"]:
        raise typer.Exit(1)


def read_limits(given: list[str]) -> dict[str, float]:
    """Milliseconds by metric; ConfigError for what is no `name:milliseconds`."""
    found = {}
    for item in " ".join(given).split():
        if not re.fullmatch(r"\w+:\d+(\.\d+)?", item):
            raise ConfigError(f"--goodput {item!r}; write ttft:500, in milliseconds")
        name, _, limit = item.partition(":")
        found[name] = float(limit)
    return found


def read_percentiles(given: str) -> list[float]:
    """Numbers of 0 to 100; ConfigError for anything else."""
    if not re.fullmatch(r"(100|\d{1,2}(\.\d+)?)(,(100|\d{1,2}(\.\d+)?))*", given):
        raise ConfigError(f"--metric-percentiles {given!r}; write 25,50,99")
    return [float(x) for x in given.split(",")]
