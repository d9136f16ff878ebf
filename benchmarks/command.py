"""The command line of a benchmark: `python -m benchmarks.NAME`, with the errors of `disagg`."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer import Option

from disagg.cli.app import report
from disagg.errors import ConfigError, DisaggError

Model = Annotated[str | None, Option(help="The model.")]
Dtype = Annotated[str | None, Option(help="float32 or bfloat16.")]


def main(command: Callable[..., None], name: str) -> None:
    """Run the command with the arguments of this process, and exit with its status."""
    arguments = sys.argv[1:]
    program = f"python -m benchmarks.{name}"
    as_json = "--json" in arguments
    try:
        run(command, arguments, program, standalone=not as_json)
    except typer.TyperException as error:
        sys.exit(report(ConfigError(error.format_message()), as_json))
    except DisaggError as error:
        sys.exit(report(error, as_json))


def run(
    command: Callable[..., None],
    arguments: Sequence[str],
    program: str,
    standalone: bool = False,
) -> None:
    """Run the command; unless `standalone`, its errors are raised."""
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    app.command()(command)
    app(args=list(arguments), prog_name=program, standalone_mode=standalone)
