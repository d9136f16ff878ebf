"""`disagg bench serve`: load a server, with the flags of `vllm bench serve`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from disagg.cli import options
from disagg.cli.output import print_json
from disagg.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from disagg.bench.serving import ServeOptions
    from disagg.bench.workload import WorkloadOptions
    from disagg.model.tokenizer import Tokenizer

Backend = Annotated[
    Literal["openai", "openai-chat"],
    Option(help="Use completions or chat completions."),
]
BaseUrl = Annotated[str, Option(help="URL of the server, without the path.")]
Endpoint = Annotated[str | None, Option(help="Path; default: that of the backend.")]
Model = Annotated[str | None, Option(help="Model name; default: the server's first.")]
TokenizerName = Annotated[
    str | None, Option(help="Folder or name; default: the server's model.")
]
Dataset = Annotated[
    Literal["random", "sharegpt", "azure", "mooncake"],
    Option(help="Source of the prompts."),
]
DatasetPath = Annotated[
    Path | None, Option(help="File of the data set; not for random.")
]
NumPrompts = Annotated[int, Option(min=1, help="Number of requests.")]
Length = Annotated[
    int | None, Option(min=1, help="Tokens per request; default: 1024 in, 128 out.")
]
RangeRatio = Annotated[
    float | None,
    Option(min=0, max=0.99, help="Vary lengths by up to this share; default: 0."),
]
PrefixLength = Annotated[
    int | None, Option(min=0, help="Tokens of a shared prefix; default: 0.")
]
Concurrency = Annotated[int | None, Option(min=1, help="Maximum concurrent requests.")]
Rate = Annotated[float, Option(min=1e-6, help="Requests per second.")]
Burstiness = Annotated[
    float, Option(min=1e-6, help="1: Poisson arrivals; below 1: bursts.")
]
SelfTimed = Annotated[bool, Option(help="Send requests at the times of the trace.")]
IgnoreEos = Annotated[
    bool, Option("--ignore-eos", help="Continue past the end-of-text token.")
]
Temperature = Annotated[float | None, Option(min=0, help="Default: the server's.")]
Goodput = Annotated[
    list[str] | None,
    Option(help='Limits in ms, "ttft:500 tpot:50"; may be repeated.'),
]
Metrics = Annotated[str, Option(help="Any of ttft, tpot, itl, e2el.")]
Percentiles = Annotated[str, Option(help="Percentiles to report: 25,50,99.")]
Seed = Annotated[int, Option(min=0, help="Seed of prompts and arrivals.")]
SaveResult = Annotated[bool, Option("--save-result", help="Write a JSON file.")]
SaveDetailed = Annotated[
    bool, Option("--save-detailed", help="Include every request in the file.")
]
ResultDir = Annotated[Path, Option(help="Folder of the file.")]
ResultFilename = Annotated[str | None, Option(help="Name of the file.")]
MAX_ERRORS = 10  # that are printed


def serve(
    backend: Backend = "openai",
    base_url: BaseUrl = "http://127.0.0.1:8000",
    endpoint: Endpoint = None,
    model: Model = None,
    tokenizer: TokenizerName = None,
    dataset_name: Dataset = "random",
    dataset_path: DatasetPath = None,
    num_prompts: NumPrompts = 1000,
    random_input_len: Length = None,
    random_output_len: Length = None,
    random_range_ratio: RangeRatio = None,
    random_prefix_len: PrefixLength = None,
    max_concurrency: Concurrency = None,
    request_rate: Rate = float("inf"),
    burstiness: Burstiness = 1.0,
    self_timed: SelfTimed = False,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = None,
    goodput: Goodput = None,
    percentile_metrics: Metrics = "ttft,tpot,itl",
    metric_percentiles: Percentiles = "99",
    seed: Seed = 0,
    save_result: SaveResult = False,
    save_detailed: SaveDetailed = False,
    result_dir: ResultDir = Path(),
    result_filename: ResultFilename = None,
    as_json: options.Json = False,
) -> None:
    """Load any OpenAI-compatible server, like `vllm bench serve`."""
    check_rate(request_rate, burstiness, self_timed)
    lengths = named_lengths(
        random_input_len, random_output_len, random_range_ratio, random_prefix_len
    )
    workload = read_workload(
        dataset_name, dataset_path, num_prompts, lengths, self_timed, seed
    )
    result_file = None
    if save_result or save_detailed:
        result_file = ResultFile(result_dir, result_filename, save_detailed)
        options.writable(result_dir / (result_filename or backend))
    options.refuse_idle(
        result_file is None, "without --save-result", result_filename=result_filename
    )
    load = {
        "backend": backend,
        "endpoint": endpoint,
        "max_concurrency": max_concurrency,
        "request_rate": request_rate,
        "burstiness": burstiness,
        "self_timed": self_timed,
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "seed": seed,
        "goodput": read_limits(goodput or []),
        "metrics": percentile_metrics.split(","),
        "percentiles": read_percentiles(metric_percentiles),
    }
    serve_options, tokenizer = find_server(base_url, model, tokenizer, load)
    result = measure(serve_options, workload, tokenizer)
    show(result, result_file, as_json)


def check_rate(request_rate: float, burstiness: float, self_timed: bool) -> None:
    """ConfigError for an option that has no meaning beside the others."""
    is_unlimited = request_rate == float("inf")
    options.refuse_idle(
        self_timed and not is_unlimited, "with --self-timed", request_rate=request_rate
    )
    options.refuse_idle(
        is_unlimited, "without --request-rate", burstiness=burstiness != 1
    )


def named_lengths(
    input_len: int | None,
    output_len: int | None,
    range_ratio: float | None,
    prefix_len: int | None,
) -> dict[str, Any]:
    """Those that are set, as fields of WorkloadOptions."""
    lengths = {
        "input_len": input_len,
        "output_len": output_len,
        "range_ratio": range_ratio,
        "prefix_len": prefix_len,
    }
    return {name: value for name, value in lengths.items() if value is not None}


def read_workload(
    dataset: str,
    path: Path | None,
    num_prompts: int,
    lengths: dict[str, Any],
    self_timed: bool,
    seed: int,
) -> "WorkloadOptions":
    """Which requests; ConfigError for an option that has no meaning for a data set."""
    options.refuse_idle(
        dataset == "random",
        "with random prompts",
        dataset_path=path,
        self_timed=self_timed,
    )
    options.refuse_idle(
        dataset != "random",
        f"with prompts of {dataset}",
        **{f"random_{name}": True for name in lengths},
    )
    from disagg.bench.workload import WorkloadOptions

    return WorkloadOptions(dataset, path, num_prompts, seed=seed, **lengths)


def find_server(
    base_url: str, model: str | None, tokenizer: str | None, load: dict[str, Any]
) -> "tuple[ServeOptions, str]":
    """The server with the load for it, and the name of its model's tokenizer."""
    from disagg.bench.serving import ServeOptions, find_model

    base_url = base_url.rstrip("/").removesuffix("/v1")
    if not model or not tokenizer:
        model, root = find_model(base_url, model)
        tokenizer = tokenizer or root
    return ServeOptions(base_url, model, **load), tokenizer


def measure(
    serve_options: "ServeOptions", workload: "WorkloadOptions", tokenizer: str
) -> dict[str, Any]:
    """The result of all requests."""
    from disagg.bench.serving import measure_serving
    from disagg.bench.workload import make_requests

    requests = make_requests(workload, load_tokenizer(tokenizer))
    return measure_serving(serve_options, requests, tokenizer)


def load_tokenizer(ref: str) -> "Tokenizer":
    """Load a tokenizer; ModelError names --tokenizer, since the model may be on the server only."""
    from disagg.model.tokenizer import Tokenizer

    try:
        return Tokenizer.load(ref)
    except ModelError as error:
        raise ModelError(f"{error}; set --tokenizer FOLDER") from error


@dataclass(frozen=True)
class ResultFile:
    """Where a result is written; `detailed`: with every request in it."""

    folder: Path
    name: str | None
    detailed: bool

    def path(self, result: dict[str, Any]) -> Path:
        """By default the name that vLLM gives a result."""
        if self.name:
            return self.folder / self.name
        rate = float(result["request_rate"])
        model = Path(result["model_id"]).name
        name = f"{result['backend']}-{rate:g}qps-{model}-{result['date']}.json"
        return self.folder / name


def show(result: dict[str, Any], result_file: ResultFile | None, as_json: bool) -> None:
    """Write and print a result; status 1 if every request failed."""
    from disagg.bench.result import write
    from disagg.bench.serving import DETAILS, draw_serving

    shown = result
    if result_file is None or not result_file.detailed:
        shown = {key: value for key, value in result.items() if key not in DETAILS}
    if result_file is not None:
        write(shown, result_file.path(result))
    errors = dict.fromkeys(error for error in result["errors"] if error)
    for error in list(errors)[:MAX_ERRORS]:
        typer.echo(f"a request failed: {error}", err=True)
    if as_json:
        print_json(shown)
    else:
        print(draw_serving(result))
    if not result["completed"]:
        raise typer.Exit(1)


def read_limits(items: list[str]) -> dict[str, float]:
    """Milliseconds by metric; ConfigError unless each is `name:milliseconds`."""
    limits = {}
    for item in " ".join(items).split():
        if not re.fullmatch(r"\w+:\d+(\.\d+)?", item):
            raise ConfigError(f"--goodput {item!r}; write ttft:500, in milliseconds")
        name, _, limit = item.partition(":")
        limits[name] = float(limit)
    return limits


def read_percentiles(text: str) -> list[float]:
    """Numbers of 0 to 100; ConfigError for anything else."""
    if not re.fullmatch(r"(100|\d{1,2}(\.\d+)?)(,(100|\d{1,2}(\.\d+)?))*", text):
        raise ConfigError(f"--metric-percentiles {text!r}; write 25,50,99")
    return [float(x) for x in text.split(",")]
