"""All commands in one application, and how errors are printed."""

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated

import typer

from disagg.cli import (
    bench,
    codecs,
    doctor,
    eval,
    fetch,
    models,
    serve,
    submit,
    workers,
)
from disagg.cli.output import tell
from disagg.errors import CapacityError, ConfigError, DisaggError, quoted

app = typer.Typer(
    name="disagg",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(submit.submit)
app.command("serve")(serve.serve)
app.command()(serve.stop)
app.command()(workers.status)
app.command()(workers.scale)
app.command()(workers.drain)
app.command()(codecs.codecs)
app.command()(codecs.page)
app.command("doctor")(doctor.doctor)
app.command("fetch")(fetch.fetch)
app.command("eval")(eval.evaluate)
app.add_typer(bench.app, name="bench")
app.add_typer(models.app, name="models")


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"disagg {version('disagg')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
]


@app.callback()
def disagg(version: Version = False) -> None:
    """Serve language models with separate prefill and decode workers."""


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit status. Errors have statuses of their own, see disagg/errors.py."""
    as_json = "--json" in arguments
    status = 0
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack some of Unicode
    try:
        status = _status(arguments, as_json)
        print(end="", flush=True)
    except OSError as error:
        sys.stdout = sys.stderr  # else the rest of the buffer is written at exit
        problem = f"{error.filename or 'input or output'}: {error.strerror or error}"
        status = status or report(ConfigError(problem), as_json)
    return status


def _status(arguments: Sequence[str], as_json: bool) -> int:
    try:
        check_text(arguments)
        status = app(
            args=list(arguments), prog_name="disagg", standalone_mode=not as_json
        )
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except typer.TyperException as error:
        return report(ConfigError(error.format_message()), as_json)
    except DisaggError as error:
        return report(error, as_json)
    except MemoryError as error:
        return report(CapacityError(str(error)), as_json)
    return status if isinstance(status, int) else 0


def check_text(arguments: Sequence[str]) -> None:
    """ConfigError for an argument that is not UTF-8: Ray reads the command line too, and fails."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"argument {quoted(argument)} is not UTF-8 text"
            ) from error


def report(error: DisaggError, as_json: bool) -> int:
    """Print an error, one line for people or one object for programs; its exit status."""
    if as_json:
        body = {"message": str(error), "type": error.reason, "code": error.http_status}
        print(json.dumps({"error": body}))
    else:
        tell(f"error: {' '.join(str(error).split())}")
    return error.exit_code
