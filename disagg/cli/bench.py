"""`disagg bench`: measurements that print what they measured and with what."""

from pathlib import Path
from typing import Annotated

import typer

from disagg.cli import options
from disagg.cli.output import print_json

app = typer.Typer(help="Measure.", no_args_is_help=True)

Runs = Annotated[int, typer.Option(min=1, help="Medians are of this many.")]
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
