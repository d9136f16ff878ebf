"""All commands in one application, and how an error looks from outside."""

import json
import sys
from collections.abc import Sequence

import typer

from disagg.cli import bench, look, serve, submit
from disagg.errors import CancelledError, ConfigError, DisaggError

app = typer.Typer(
    name="disagg",
    help="Prefill here, decode there: language model serving with compressed KV in between.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(submit.submit)
app.command("serve")(serve.serve)
app.command()(serve.status)
app.command()(serve.stop)
app.command()(look.codecs)
app.command()(look.page)
app.add_typer(bench.app, name="bench")


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit status. Errors have statuses of their own, see disagg/errors.py."""
    as_json = "--json" in arguments
    try:
        status = app(args=list(arguments), prog_name="disagg", standalone_mode=not as_json)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except typer.TyperException as error:
        return report(ConfigError(error.format_message()), as_json)
    except DisaggError as error:
        return report(error, as_json)
    except KeyboardInterrupt:
        return report(CancelledError("interrupted"), as_json)
    return status if isinstance(status, int) else 0


def report(error: DisaggError, as_json: bool) -> int:
    """Print an error, one line for people or one object for programs; its exit status."""
    if as_json:
        body = {"message": str(error), "type": error.reason, "code": error.http_status}
        print(json.dumps({"error": body}))
    else:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return error.exit_code
