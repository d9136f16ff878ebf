"""`disagg models`: whether a model can be served, and how large its KV is."""

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from disagg.cli import options
from disagg.cli.output import print_json, print_table
from disagg.config import EngineConfig
from disagg.errors import ConfigError, DisaggError, ModelError

if TYPE_CHECKING:
    from disagg.model.capacity import ModelFit

app = typer.Typer(no_args_is_help=True, help="Check whether a model can be served.")
UNITS = {
    "": 1,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}

Ref = Annotated[
    str | None,
    Argument(help="Folder or Hugging Face name; default: the packaged model."),
]
Memory = Annotated[str | None, Option(help="Memory of one accelerator: 80GB, 24GiB.")]
Dtype = Annotated[
    str, Option(help="Dtype of the model; default: that of the checkpoint.")
]

Context = Annotated[
    int | None,
    Option(min=2, help="Maximum tokens of a prompt with its answer, as model.context."),
]

Ranks = Annotated[
    int,
    Option(
        min=1, help="Accelerators that share the model; the numbers are those of each."
    ),
]


@app.command()
def check(
    ref: Ref = None,
    memory: Memory = None,
    dtype: Dtype = "auto",
    context: Context = None,
    ranks: Ranks = 1,
    as_json: options.Json = False,
) -> None:
    """Check whether a model can be served, and how many tokens fit."""
    from disagg.model.capacity import check_model

    room = None if memory is None else parse_bytes(memory)
    fit = check_model(ref, dtype, room, EngineConfig().memory_share, context, ranks)
    reason = _wrong_file(ref, fit)
    if reason:
        fit = replace(fit, served=False, reason=reason)
    if as_json:
        print_json(asdict(fit))
    else:
        _draw(fit)
    if not fit.served:
        raise typer.Exit(ModelError.exit_code)


def _wrong_file(ref: str | None, fit: "ModelFit") -> str:
    """Why `disagg serve` refuses a file beside a model's weights; empty: it does not."""
    from disagg.engine.sampling_defaults import read_sampling_defaults
    from disagg.model.chat_files import read_template
    from disagg.model.tokenizer import Tokenizer

    if not fit.served:
        return ""
    try:
        read_template(ref)
        read_sampling_defaults(ref)
        if fit.weights_bytes:
            Tokenizer.load(ref)
    except DisaggError as error:
        return " ".join(str(error).split())
    return ""


def parse_bytes(text: str) -> int:
    """Bytes of "80GB" or "24GiB"; ConfigError for anything else."""
    match = re.fullmatch(r"([0-9.]+)\s*((?:[MGT]i?)?)B?", text.strip())
    try:
        return int(float(match[1]) * UNITS[match[2]])  # type: ignore[index]
    except (TypeError, ValueError):
        raise ConfigError(f"{text!r} is not a size; expected 80GB or 24GiB") from None


def _draw(fit: "ModelFit") -> None:
    if not fit.served:
        print(f"{fit.architecture}: not served: {fit.reason}")
        return
    for line in _facts(fit):
        print(line)
    rows = [
        [codec.spec, codec.refused or f"{codec.bytes_per_token:,.0f}"]
        for codec in fit.codecs
    ]
    columns = ["codec", ">bytes a token"]
    if fit.state_bytes:
        columns.append(">tokens as large as the states")
        _add_column(rows, fit, [codec.state_tokens for codec in fit.codecs])
    has_memory = any(codec.tokens is not None for codec in fit.codecs)
    if has_memory:
        columns.append(">tokens that fit")
        _add_column(rows, fit, [codec.tokens or 0 for codec in fit.codecs])
    print_table(f"in prompts of {fit.context_length:,} tokens", columns, rows)
    if not has_memory:
        print("--memory 24GiB adds how many tokens fit on an accelerator")


def _add_column(rows: list[list[str]], fit: "ModelFit", counts: Sequence[int]) -> None:
    """A number for each codec, none for one that is refused."""
    for row, codec, number in zip(rows, fit.codecs, counts, strict=True):
        row.append("" if codec.refused else f"{number:,}")


def _heads(fit: "ModelFit") -> str:
    """KV heads and their channels, by number of layers where they differ; or latents."""
    if fit.latent:
        rotated = fit.head_dim - fit.latent
        return f"latents of {fit.latent} channels, rotated keys of {rotated}"
    if len(fit.head_sizes) == 1:
        return f"{fit.heads} KV heads of {fit.head_dim}"
    sizes = [f"{count} x {size}" for size, count in fit.head_sizes.items()]
    return f"KV heads x channels: {', '.join(sizes)}"


def _weights(fit: "ModelFit") -> str:
    if fit.config_weights_bytes:
        return f"weights {fit.config_weights_bytes / 1e6:,.0f} MB by config.json"
    if not fit.weights_bytes:
        return "no files of weights"
    return f"weights {fit.weights_bytes / 1e6:,.0f} MB"


def _facts(fit: "ModelFit") -> list[str]:
    """What a served model is like, in lines."""
    spans = [
        f"{count} x {f'{window} tokens' if window else 'all'}"
        for window, count in fit.windows.items()
    ]
    context = f"context {fit.context_length:,} tokens"
    if fit.max_context > fit.context_length:
        context += f", with model.context up to {fit.max_context:,}"
    ends = ", ".join(map(str, fit.eos_ids)) or "none"
    dtype = f"dtype on accelerators: {fit.dtype}"
    if fit.cpu_dtype:
        dtype += f" · on the CPU of this host: {fit.cpu_dtype}"
    if fit.cpu_weights:
        dtype += f", which takes model.weights {' or '.join(fit.cpu_weights)}"
    what = "latents" if fit.latent else "KV"
    exact = f"exact {what} {fit.exact_bytes_per_token:,} bytes a token in {fit.dtype}"
    states = []
    if fit.state_bytes:
        megabytes = f"{fit.state_bytes / 1e6:,.1f} MB"
        forms = [
            f"{nbytes / 1e6:,.1f} MB {form}"
            for form, nbytes in fit.wire_state_bytes.items()
        ]
        states = [
            f"states: {megabytes} a sequence in {fit.num_states} layers · "
            f"handed off: {', '.join(forms)}"
        ]
    return [
        f"{fit.architecture}: served",
        f"layers that see: {', '.join(spans)} · {_heads(fit)}",
        f"{context} · {_weights(fit)}",
        dtype,
        f"tokens that end an answer: {ends}",
        f"{exact} · recommended: {fit.recommended}",
        *states,
    ]
