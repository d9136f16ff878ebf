"""`disagg bench`: measurements that print what they measured and with what."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg.cli import options
from disagg.cli.output import print_json
from disagg.errors import ConfigError

app = typer.Typer(help="Measure.", no_args_is_help=True)

Runs = Annotated[int, typer.Option(min=1, help="Medians are of this many.")]
Codecs = Annotated[list[str] | None, typer.Option("--codec", help="Codec spec; may be repeated.")]
Lengths = Annotated[list[int] | None, typer.Option("--tokens", min=1, help="May be repeated.")]
Rates = Annotated[list[float] | None, typer.Option("--gbps", min=1e-3, help="May be repeated.")]
Links = Annotated[
    bool | None,
    typer.Option("--netns/--no-netns", help="Links of the kernel, as root; --plane where it may."),
]
Plane = Annotated[bool, typer.Option("--plane", help="The bare data plane against a TCP socket.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw to this .png, .svg or .pdf file.")]
Size = Annotated[int, typer.Option(min=1, help="Of the KV; the defaults are Llama 3.1 8B.")]
Out = Annotated[Path | None, typer.Option(help="Also write the result to this file.")]


@app.callback()
def bench() -> None:
    """Measure."""


@app.command()
def overlap(runs: Runs = 5, out: Out = None, as_json: options.Json = False) -> None:
    """Time to the first decode token over a paced link, with and without overlap."""
    from disagg.bench.overlap import draw, measure, write

    result = measure(runs)
    if out is not None:
        write(result, out)
    if as_json:
        print_json(result)
    else:
        draw(result)


@app.command()
def kernels(
    machine_code: bool = False, device: str = "cpu", out: Out = None, as_json: options.Json = False
) -> None:
    """What attention kernels cost: from machine code, or timed on this CPU or GPU."""
    from disagg.bench.kernels import Options, draw, measure, write

    result = measure(Options(machine_code, device))
    if out is not None:
        write(result, out)
    (print_json if as_json else draw)(result)


@app.command()
def decode(
    device: str = "cpu",
    model: str = "small",
    codec: Codecs = None,
    size: Annotated[list[str] | None, typer.Option(help="4x2048; may be repeated.")] = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """Steps of a whole model of random weights, by codec."""
    from disagg.bench.decode import CODECS, Options, run
    from disagg.bench.kernels import table, write

    result = run(Options(device, model, codec or CODECS, size or ()))
    if out is not None:
        write(result, out)
    if as_json:
        print_json(result)
    else:
        print(table(result["rows"]))


@app.command()
def transfer(
    codec: Codecs = None,
    tokens: Lengths = None,
    gbps: Rates = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Medians are of this many.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of the encoder.")] = 1,
    layers: Size = 32,
    heads: Size = 8,
    head_dim: Size = 128,
    netns: Links = None,
    plane: Plane = False,
    plot: Plot = None,
    out: Out = None,
    as_json: options.Json = False,
) -> None:
    """What compression is worth on a link; with --plane, what the plane is beside a socket."""
    from disagg.bench.shape import Shape

    given: dict[str, Any] = {"shape": Shape(layers, heads, head_dim), "rounds": rounds}
    given["gbps"] = tuple(gbps) if gbps else None
    if plane:
        if plot or len(codec or ()) > 1 or len(tokens or ()) > 1:
            raise ConfigError("--plane measures one codec and one length, and draws nothing")
        one = {"codec": codec and codec[0], "tokens": tokens and tokens[0], "netns": netns}
        result, table = _measure_plane(given | one)
    else:
        lists = {"codecs": codec and tuple(codec), "tokens": tokens and tuple(tokens)}
        more = {"netns": bool(netns), "threads": threads}
        result, table = _measure_transfer(given | lists | more, plot)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
    (print_json if as_json else print)(result if as_json else table)


def _measure_transfer(given: dict[str, Any], plot: Path | None) -> tuple[dict[str, Any], str]:
    from disagg.bench import transfer as bench_transfer
    from disagg.bench.provenance import result_of

    if plot is not None:
        from disagg.report.transfer import check_name, draw

        check_name(plot)
    rows = bench_transfer.run(bench_transfer.TransferOptions(**_set(given)))
    result = result_of("disagg.bench.transfer", rows, bench_transfer.NOTES)
    if plot is not None:
        draw(result["rows"], plot)
    return result, bench_transfer.table(rows)


def _measure_plane(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    from disagg.bench import plane as bench_plane
    from disagg.bench.netns import available
    from disagg.bench.provenance import result_of

    if given["netns"] is None:
        given["netns"] = available()
    rows = bench_plane.run(bench_plane.PlaneOptions(**_set(given)))
    return result_of("disagg.bench.plane", rows, bench_plane.NOTES), bench_plane.table(rows)


def _set(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
