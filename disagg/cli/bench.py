"""`disagg bench`: measurements that print what they measured and with what.

Each has a function in disagg.bench that gives a JSON object, and one that draws the text that
people read of it. Progress goes to stderr.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from disagg.cli import bench_serve, options
from disagg.cli.checks import check_codecs
from disagg.cli.output import print_json
from disagg.errors import ConfigError

app = typer.Typer(help="Measure.", no_args_is_help=True)
app.command()(bench_serve.serve)

ANSWER = 16  # tokens, behind the prompts of `compare`
Device = Annotated[Literal["cpu", "cuda"], Option(help="Where it runs.")]
Random = Annotated[
    Literal["small", "wide", "135m", "8b"], Option(help="Of random weights.")
]
Runs = Annotated[int, Option(min=1, help="Medians are of this many.")]
Rounds = Annotated[int | None, Option(min=1, help="Medians are of this many.")]
Codecs = Annotated[
    list[str] | None, Option("--codec", help="Codec spec; may be repeated.")
]
Size = Annotated[int, Option(min=1, help="Of the KV; the defaults are Llama 3.1 8B.")]
Out = Annotated[
    Path | None, Option(callback=options.writable, help="Also write it here.")
]


@app.command()
def overlap(runs: Runs = 5, out: Out = None, as_json: options.Json = False) -> None:
    """Time to the first decode token over a paced link, with and without overlap."""
    from disagg.bench.handoff import measure_overlap

    _show(measure_overlap(runs), out, as_json)


@app.command()
def load(out: Out = None, as_json: options.Json = False) -> None:
    """How long 48 prompts of 4 to 1,500 tokens wait for each other, and should wait."""
    from disagg.bench.handoff import measure_load

    _show(measure_load(), out, as_json)


@app.command()
def streams(
    model: options.Model = None,
    part: list[str] | None = Option(None, help="May be repeated; all of it."),
    rounds: Rounds = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """A service beside a dense batch and `LLM`; long and known prompts beside others."""
    by_rounds = not part or {"overhead", "known"} & {*part}
    options.refuse_idle(
        not by_rounds, "without the parts overhead and known", rounds=rounds
    )
    from disagg.bench.streams import StreamsOptions, measure_streams

    asked = StreamsOptions(model, **_set({"rounds": rounds, "parts": part}))
    check_codecs(model, (), tokens=asked.most_tokens)
    _show(measure_streams(asked), out, as_json)


@app.command()
def latency(
    codec: str | None = None,
    tokens: int | None = Option(None, min=1, help="Of the tiny prompt."),
    rounds: Rounds = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """From the last prefill layer to running, and what arriving prompts cost an answer."""
    check_codecs(None, [] if codec is None else [codec], tokens=(tokens or 0) + 1)
    from disagg.bench.handoff import LatencyOptions, draw_latency, measure_latency

    given = _set({"codec": codec, "tokens": tokens, "rounds": rounds})
    _show(measure_latency(LatencyOptions(**given)), out, as_json, draw_latency)


@app.command()
def chaos(
    seed: int | None = Option(None, help="Of the strikes; 1."),
    minutes: float = Option(10.0, min=0.1, help="How long."),
    codec: str | None = None,
    streams: int = Option(40, min=1),
    calm: bool = Option(False, "--calm", help="Strike nobody."),
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Streams while workers are killed, frozen, drained and cut off."""
    options.refuse_idle(
        calm, "with --calm, which strikes nobody", seed=seed is not None
    )
    check_codecs(None, [] if codec is None else [codec])
    from disagg.bench.crew import ChaosOptions, draw_chaos, measure_chaos

    given = _set({"codec": codec, "seed": seed})
    asked = ChaosOptions(minutes=minutes, streams=streams, calm=calm, **given)
    _show(measure_chaos(asked), out, as_json, draw_chaos)


@app.command()
def moves(runs: Runs = 20, out: Out = None, as_json: options.Json = False) -> None:
    """What an answer notices when it goes on at another decode worker."""
    from disagg.bench.crew import measure_moves

    _show(measure_moves(runs), out, as_json)


@app.command()
def kernels(
    machine_code: bool = False,
    device: Literal["cpu", "cuda"] | None = Option(None, help="Where it runs; cpu."),
    target: list[str] | None = Option(None, "--target", help="Of machine code: sm_90."),
    runs: Rounds = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """What attention and encoding cost: from machine code, or timed on this CPU or GPU."""
    timed = {"device": device, "runs": runs}
    options.refuse_idle(
        machine_code, "with --machine-code, which times nothing", **timed
    )
    options.refuse_idle(not machine_code, "without --machine-code", target=target)
    from disagg.bench import kernels

    if machine_code:
        result = kernels.read_machine_code(**_set({"targets": target}))
    else:
        result = kernels.run(kernels.KernelOptions(**_set(timed)))
    _show(result, out, as_json)


@app.command()
def decode(
    device: Device = "cpu",
    model: Random = "small",
    dtype: str | None = Option(None, help="Of weights: float32, bfloat16."),
    threads: int | None = Option(None, min=1, max=1024, help="Of torch, on a CPU."),
    codec: Codecs = None,
    size: list[str] | None = Option(None, help="4x2048; may be repeated."),
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Steps of a whole model of random weights, by codec."""
    from disagg.bench.decode import DecodeOptions, run

    given = _set({"codecs": codec, "sizes": size, "dtype": dtype, "threads": threads})
    _show(run(DecodeOptions(device, model, **given)), out, as_json)


@app.command()
def capacity(
    device: Device = "cpu",
    model: Random = "small",
    memory_mb: float = Option(16, min=1, max=1e9, help="For KV, of what is measured."),
    tokens: int = Option(2048, min=1, help="Of each sequence."),
    codec: Codecs = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Sequences that fit in a memory, and their speed: measured here, modelled for GPUs."""
    from disagg.bench.decode import CapacityOptions, measure_capacity

    asked = CapacityOptions(device, model, memory_mb, tokens, **_set({"codecs": codec}))
    _show(measure_capacity(asked), out, as_json)


@app.command()
def compare(
    model: options.Model = None,
    codec: Codecs = None,
    cached: bool = Option(False, "--cached", help="Prefill knows the prompts."),
    prompts: int = Option(3, min=1, help="Of each cell."),
    tokens: int = Option(512, min=1, help="Of a prompt."),
    plot: options.Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Co-located against disaggregated, codecs against raw, on links that are paced."""
    check_codecs(model, codec or (), tokens=tokens + ANSWER)
    from disagg.bench.compare import CompareOptions, draw_compare, measure_compare

    given = _set({"codecs": codec}) | {
        "prompts": prompts,
        "tokens": tokens,
        "answer": ANSWER,
    }
    result = measure_compare(CompareOptions(model, cached=cached, **given))
    _show(result, out, as_json, draw_compare, plot)


@app.command()
def auto(
    model: options.Model = None,
    codec: Codecs = None,
    requests: int = Option(50, min=1, help="Of each phase and codec."),
    tokens: int = Option(512, min=256, max=8192, help="As samples have."),
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Codecs that the service chooses, on a link that drops and returns."""
    check_codecs(model, codec or (), tokens=tokens + 2)
    from disagg.bench.compare import AutoOptions, draw_auto, measure_auto

    asked = AutoOptions(
        model, requests=requests, tokens=tokens, **_set({"codecs": codec})
    )
    _show(measure_auto(asked), out, as_json, draw_auto)


@app.command()
def transfer(
    codec: Codecs = None,
    tokens: list[int] | None = Option(None, "--tokens", min=1, help="May be repeated."),
    gbps: list[float] | None = Option(
        None, "--gbps", min=1e-3, max=1e3, help="May be repeated."
    ),
    rounds: Rounds = None,
    threads: int | None = Option(None, min=1, max=1024, help="Of the encoder; 1."),
    layers: Size = 32,
    heads: Size = 8,
    head_dim: Size = 128,
    channel: Literal["grpc", "direct"] | None = Option(
        None, help="How frames go; grpc."
    ),
    netns: bool | None = Option(
        None,
        "--netns/--no-netns",
        help="Links of the kernel, as root; --plane where it may.",
    ),
    plane: bool = Option(False, "--plane", help="Every channel beside a TCP socket."),
    plot: options.Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """What compression is worth on a link; with --plane, what every channel is beside a socket."""
    from disagg.bench.inputs import shape_of

    given: dict[str, Any] = {
        "shape": shape_of(layers, heads, head_dim),
        "threads": threads,
    }
    given |= {"channel": channel, "netns": netns, "rounds": rounds}
    given = _set(given | {"codecs": codec, "tokens": tokens, "gbps": gbps})
    if not plane:
        from disagg.bench.transfer import TransferOptions, draw, measure

        _show(measure(TransferOptions(**given)), out, as_json, draw, plot)
        return
    if plot or len(codec or ()) > 1 or len(tokens or ()) > 1:
        raise ConfigError(
            "--plane measures one codec and one length, and draws nothing"
        )
    options.refuse_idle(plane, "with --plane", threads=threads, channel=channel)
    from disagg.bench.child import available
    from disagg.bench.transfer import PLANE, draw_plane, measure_plane

    asked = replace(PLANE, **{"netns": available()} | given)
    options.refuse_idle(
        not asked.netns, "on loopback: --netns makes links with a rate", gbps=gbps
    )
    _show(measure_plane(asked), out, as_json, draw_plane)


def _set(given: dict[str, Any]) -> dict[str, Any]:
    """What was given; the rest has defaults."""
    return {name: value for name, value in given.items() if value is not None}


def _show(
    result: dict[str, Any],
    out: Path | None,
    as_json: bool,
    draw: Callable[[dict[str, Any]], str] | None = None,
    plot: Path | None = None,
) -> None:
    """Write a result to a file and a picture if asked, and print it: as `draw` has it, else the
    tables that are in it."""
    from disagg.bench.result import tables, write

    if out is not None:
        write(result, out)
    if plot is not None:  # behind the file: a picture may fail
        from disagg.report import transfer as pictures

        pictures.draw(result, plot)
    if as_json:
        print_json(result)
    else:
        print((draw or tables)(result))
        print(f"kernels: {result['machine']['kernels']}", file=sys.stderr)
