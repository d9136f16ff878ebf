"""`disagg bench`: benchmarks of this machine or of a running service.

Each is a function in disagg.bench that returns a JSON object, and one that formats it as text.
Progress goes to stderr. Benchmarks for developers are in `benchmarks/` of a checkout; their old
names here remain as aliases for one release.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from disagg.cli import bench_serve, options
from disagg.cli.checks import check_codecs
from disagg.cli.output import print_json
from disagg.errors import ConfigError

app = typer.Typer(
    help="Benchmarks of this machine or of a running server.", no_args_is_help=True
)
app.command()(bench_serve.serve)

ANSWER_TOKENS = 16  # after the prompts of `compare`
ALIASES = ("overlap", "load", "latency", "streams", "chaos", "moves", "auto")
Device = Annotated[Literal["cpu", "cuda"], Option(help="Device to measure.")]
RandomModel = Annotated[
    Literal["small", "wide", "135m", "8b"],
    Option(help="Model shape; the weights are random."),
]
Runs = Annotated[int, Option(min=1, help="Runs per median.")]
Rounds = Annotated[int | None, Option(min=1, help="Runs per median.")]
Codecs = Annotated[
    list[str] | None, Option("--codec", help="Codec spec; may be repeated.")
]
Out = Annotated[
    Path | None,
    Option(callback=options.writable, help="Also write the result to this JSON file."),
]


@app.command()
def kernels(
    machine_code: bool = Option(
        False, "--machine-code", help="Moved to `python -m benchmarks.machine_code`."
    ),
    device: Literal["cpu", "cuda"] | None = Option(
        None, help="Device to measure; default: cpu."
    ),
    target: list[str] | None = Option(
        None, "--target", help="GPU for --machine-code: sm_90."
    ),
    latents: bool = Option(
        False, "--latents", help="Measure latents (MLA) instead of K and V."
    ),
    runs: Rounds = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Time attention and encoding kernels on this CPU or GPU."""
    if machine_code:
        options.refuse_idle(
            machine_code,
            "with --machine-code, which times nothing",
            device=device,
            runs=runs,
        )
        module = import_benchmark("machine_code", "bench kernels --machine-code")
        module.machine_code(target, out, as_json)
        return
    options.refuse_idle(not machine_code, "without --machine-code", target=target)
    from disagg.bench.kernels import LATENT_SHAPES, LATENT_SPECS, KernelOptions, run

    fields = without_none(device=device, runs=runs)
    if latents:
        fields |= {"specs": LATENT_SPECS, "shapes": LATENT_SHAPES}
    show(run(KernelOptions(**fields)), out, as_json)


@app.command()
def decode(
    device: Device = "cpu",
    model: RandomModel = "small",
    dtype: str | None = Option(None, help="Dtype of the weights: float32 or bfloat16."),
    threads: int | None = Option(None, min=1, max=1024, help="Torch threads on a CPU."),
    codec: Codecs = None,
    size: list[str] | None = Option(
        None, help="Sequences x tokens, 4x2048; may be repeated."
    ),
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Time decode steps of a whole model, for each codec."""
    from disagg.bench.decode import DecodeOptions, run

    fields = without_none(codecs=codec, sizes=size, dtype=dtype, threads=threads)
    show(run(DecodeOptions(device, model, **fields)), out, as_json)


@app.command()
def capacity(
    device: Device = "cpu",
    model: RandomModel = "small",
    memory_mb: float = Option(
        16, min=1, max=1e9, help="Memory for KV in the measurement."
    ),
    tokens: int = Option(2048, min=1, help="Tokens of each sequence."),
    codec: Codecs = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Count the sequences that fit in memory, and time decoding them."""
    from disagg.bench.capacity import CapacityOptions, measure_capacity

    fields = without_none(codecs=codec)
    capacity_options = CapacityOptions(device, model, memory_mb, tokens, **fields)
    show(measure_capacity(capacity_options), out, as_json)


@app.command()
def compare(
    model: options.Model = None,
    codec: Codecs = None,
    cached: bool = Option(
        False, "--cached", help="Send prompts that prefill has cached."
    ),
    prompts: int = Option(3, min=1, help="Prompts per cell."),
    tokens: int = Option(512, min=1, help="Tokens per prompt."),
    plot: options.Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Compare co-located with disaggregated serving on several links."""
    check_codecs(model, codec or (), tokens=tokens + ANSWER_TOKENS)
    from disagg.bench.compare import CompareOptions, draw_compare, measure_compare

    compare_options = CompareOptions(
        model,
        prompts=prompts,
        tokens=tokens,
        answer=ANSWER_TOKENS,
        cached=cached,
        **without_none(codecs=codec),
    )
    show(measure_compare(compare_options), out, as_json, draw_compare, plot)


@app.command()
def transfer(
    codec: Codecs = None,
    tokens: list[int] | None = Option(
        None, "--tokens", min=1, help="Prompt length; default: 2048; may be repeated."
    ),
    gbps: list[float] | None = Option(
        None,
        "--gbps",
        min=1e-3,
        max=1e3,
        help="Link rate; default: 1; may be repeated.",
    ),
    rounds: Rounds = None,
    threads: int | None = Option(
        None, min=1, max=1024, help="Encoder threads; default: 1."
    ),
    layers: int = Option(32, min=1, help="Layers; default: those of Llama 3.1 8B."),
    heads: int = Option(8, min=1, help="KV heads."),
    head_dim: int = Option(128, min=1, help="Head dim."),
    channel: Literal["grpc", "direct"] | None = Option(
        None, help="Transport of frames; default: grpc."
    ),
    netns: bool | None = Option(
        None,
        "--netns/--no-netns",
        help="Pace the link in the kernel, as root; default: with --plane, if possible.",
    ),
    plane: bool = Option(
        False, "--plane", help="Compare every channel with a TCP socket."
    ),
    plot: options.Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Measure what compression saves on a network link. Takes about a minute."""
    from disagg.bench.inputs import shape_of

    fields = without_none(
        shape=shape_of(layers, heads, head_dim),
        threads=threads,
        channel=channel,
        netns=netns,
        rounds=rounds,
        codecs=codec,
        tokens=tokens,
        gbps=gbps,
    )
    if not plane:
        from disagg.bench.transfer import TransferOptions, draw, measure

        show(measure(TransferOptions(**fields)), out, as_json, draw, plot)
        return
    if plot or len(codec or ()) > 1 or len(tokens or ()) > 1:
        raise ConfigError(
            "--plane measures one codec and one length, and draws nothing"
        )
    options.refuse_idle(plane, "with --plane", threads=threads, channel=channel)
    from disagg.bench import link
    from disagg.bench.plane import PLANE, draw_plane, measure_plane

    fields.setdefault("netns", link.available())
    plane_options = replace(PLANE, **fields)
    options.refuse_idle(
        not plane_options.netns,
        "on loopback: --netns makes links with a rate",
        gbps=gbps,
    )
    show(measure_plane(plane_options), out, as_json, draw_plane)


@app.command()
def front(
    part: list[str] | None = Option(
        None,
        "--part",
        help="relay, doors, burst, long-prompts, hung-engine, sleepy, ignored-fields, scores or "
        "link-again; may be repeated; default: all.",
    ),
    doors: list[int] | None = Option(
        None, "--doors", min=1, help="Doors of part doors; may be repeated; 1 and 2."
    ),
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Measure what a front end relays and what can hold it up, with fake workers."""
    from disagg.bench.front import FrontOptions, draw_front, measure_front

    fields = without_none(parts=part, doors=doors)
    result = measure_front(FrontOptions(**fields))
    show(result, out, as_json, draw_front)


def without_none(**values: Any) -> dict[str, Any]:
    """Options that were set; the others have defaults."""
    return {name: value for name, value in values.items() if value is not None}


def show(
    result: dict[str, Any],
    out: Path | None,
    as_json: bool,
    draw: Callable[[dict[str, Any]], str] | None = None,
    plot: Path | None = None,
) -> None:
    """Write a result to files, and print it: with `draw`, or else as its tables."""
    from disagg.bench.result import write
    from disagg.bench.tables import tables

    if out is not None:
        write(result, out)
    if plot is not None:  # after the file: a picture may fail
        from disagg.report import transfer as pictures

        pictures.draw(result, plot)
    if as_json:
        print_json(result)
    else:
        print((draw or tables)(result))
        print(f"kernels: {result['machine']['kernels']}", file=sys.stderr)


# -- benchmarks of developers, by their old names


def import_benchmark(name: str, alias: str) -> Any:
    """The module of benchmarks/; ConfigError outside of a checkout."""
    module = f"benchmarks.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", module):
            raise
        raise ConfigError(
            f"`disagg {alias}` is now `python -m {module}`, run in a checkout of disagg"
        ) from error


def add_alias(name: str) -> None:
    """`disagg bench NAME` with all arguments of `python -m benchmarks.NAME`."""

    @app.command(
        name,
        hidden=True,
        add_help_option=False,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
        },
    )
    def alias(context: typer.Context) -> None:
        benchmark = import_benchmark(name, f"bench {name}")
        command = import_benchmark("command", f"bench {name}")
        command.run(getattr(benchmark, name), context.args, f"disagg bench {name}")


for _name in ALIASES:
    add_alias(_name)
