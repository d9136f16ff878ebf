"""`disagg bench serve`: the flags of `vllm bench serve` that say something of a server."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from disagg.cli import options
from disagg.cli.output import print_json
from disagg.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from disagg.model.tokenizer import Tokenizer

Backend = Annotated[Literal["openai", "openai-chat"], typer.Option(help="Completions or chat.")]
BaseUrl = Annotated[str, typer.Option(help="Of the server, without the path.")]
Endpoint = Annotated[str | None, typer.Option(help="The path, if not that of the backend.")]
ModelId = Annotated[str | None, typer.Option(help="As the server calls it; its first one.")]
TokenizerRef = Annotated[str | None, typer.Option(help="Folder or name; what the server says.")]
Datasets = Literal["random", "sharegpt", "azure", "mooncake"]
Dataset = Annotated[Datasets, typer.Option(help="Where prompts are from.")]
DatasetPath = Annotated[Path | None, typer.Option(help="The file of all others but random.")]
Count = Annotated[int, typer.Option(min=1, help="Requests.")]
Length = Annotated[int, typer.Option(min=1, help="Tokens of each request.")]
Prefix = Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")]
Ratio = Annotated[float, typer.Option(min=0, max=0.99, help="Lengths differ by up to this share.")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests on the way at once.")]
Rate = Annotated[float, typer.Option(min=1e-6, help="Requests a second.")]
Burstiness = Annotated[float, typer.Option(min=1e-6, help="1: Poisson; less: in bursts.")]
SelfTimed = Annotated[bool, typer.Option(help="Requests leave when the trace says.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end of the text.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Else the server's.")]
Goodput = Annotated[
    list[str] | None, typer.Option(help='Limits in ms, "ttft:500 tpot:50"; may be repeated.')
]
Metrics = Annotated[str, typer.Option(help="Of ttft, tpot, itl and e2el.")]
Percentiles = Annotated[str, typer.Option(help="25,50,99.")]
Save = Annotated[bool, typer.Option("--save-result", help="Write a JSON file.")]
Detailed = Annotated[bool, typer.Option("--save-detailed", help="With every request in it.")]
Folder = Annotated[Path, typer.Option(help="Where it is written.")]
File = Annotated[str | None, typer.Option(help="Its name.")]


def serve(
    backend: Backend = "openai",
    base_url: BaseUrl = "http://127.0.0.1:8000",
    endpoint: Endpoint = None,
    model: ModelId = None,
    tokenizer: TokenizerRef = None,
    dataset_name: Dataset = "random",
    dataset_path: DatasetPath = None,
    num_prompts: Count = 1000,
    random_input_len: Length = 1024,
    random_output_len: Length = 128,
    random_range_ratio: Ratio = 0.0,
    random_prefix_len: Prefix = 0,
    max_concurrency: Concurrency = None,
    request_rate: Rate = float("inf"),
    burstiness: Burstiness = 1.0,
    self_timed: SelfTimed = False,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = None,
    goodput: Goodput = None,
    percentile_metrics: Metrics = "ttft,tpot,itl",
    metric_percentiles: Percentiles = "99",
    seed: int = 0,
    save_result: Save = False,
    save_detailed: Detailed = False,
    result_dir: Folder = Path(),
    result_filename: File = None,
    as_json: options.Json = False,
) -> None:
    """Load on any OpenAI server: the flags, table and JSON of `vllm bench serve`."""
    saved = save_result or save_detailed
    options.refuse_idle(not saved, "without --save-result", result_filename=result_filename)
    options.refuse_idle(dataset_name == "random", "with random prompts", dataset_path=dataset_path)
    paced = self_timed and request_rate < float("inf")
    options.refuse_idle(paced, "with --self-timed", request_rate=request_rate)
    options.writable(result_dir / (result_filename or backend) if saved else None)
    how = (backend, endpoint, max_concurrency, request_rate, burstiness, self_timed)
    what = (ignore_eos, temperature, seed, read_limits(goodput or []))
    told = (percentile_metrics.split(","), read_percentiles(metric_percentiles))
    from disagg.bench import serving

    base_url = base_url.rstrip("/").removesuffix("/v1")
    said = model and tokenizer and (model, tokenizer)
    name, root = said or serving.find_model(base_url, model)
    asked = serving.ServeOptions(base_url, name, *how, *what, *told)
    lengths = (random_input_len, random_output_len, random_range_ratio, random_prefix_len)
    wanted = serving.WorkloadOptions(dataset_name, dataset_path, num_prompts, *lengths, seed)
    visits = serving.make_visits(wanted, load_tokenizer(tokenizer or root))
    found = serving.measure_serving(asked, visits, tokenizer or root)
    stem = f"{backend}-{request_rate:g}qps-{Path(name).name}-{found['date']}.json"
    file = result_dir / (result_filename or stem) if saved else None
    _tell(found, file, save_detailed, as_json)


def load_tokenizer(ref: str) -> "Tokenizer":
    """ModelError that names the option where a server found its model in a place of its own."""
    from disagg.model.tokenizer import Tokenizer

    try:
        return Tokenizer.load(ref)
    except ModelError as error:
        raise ModelError(f"{error}; --tokenizer FOLDER names one that is here") from error


def _tell(found: dict[str, Any], file: Path | None, detailed: bool, as_json: bool) -> None:
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
