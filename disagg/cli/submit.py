"""`disagg submit`: one prompt, its continuation, and what the hand-off saved."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typer import Argument, Option

from disagg.cli import options
from disagg.cli.client import RunningService, persist, read_state
from disagg.cli.output import print_json, print_savings
from disagg.cli.serve import private_service, ready
from disagg.errors import CancelledError, RequestError


def submit(
    text: str = Argument(
        ..., help='The prompt; "-" reads standard input, "@FILE" a file.'
    ),
    url: str | None = Option(
        None, help="A service; else the running one, else a new one."
    ),
    model: options.Model = None,
    codec: options.Codec = None,
    max_tokens: int = Option(64, min=1, help="Tokens to generate."),
    temperature: float = Option(0.0, min=0.0, help="0: the most likely token."),
    top_p: float = Option(1.0, help="Choose among the tokens that make up this share."),
    top_k: int = Option(0, min=0, help="Choose among so many tokens; 0: all."),
    seed: int | None = Option(None, min=0, help="Makes sampling repeatable."),
    stop: list[str] | None = Option(
        None, help="End before this text; may be repeated."
    ),
    ignore_eos: bool = Option(False, help="Go on behind the end of the text."),
    chat: bool = Option(
        False, "--chat", help="Say it to a chat model, by its template."
    ),
    api_key: options.ApiKey = None,
    config: options.ConfigFile = None,
    sets: options.Set = None,
    state_file: options.StateFile = None,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt, at --url, the running service or a private one."""
    prompt = read_prompt(text)
    asked = (
        {"messages": [{"role": "user", "content": prompt}]}
        if chat
        else {"prompt": prompt}
    )
    body: dict[str, Any] = {
        **asked,
        "model": model,
        "codec": codec,
        "max_tokens": max_tokens,
    }
    body |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    body |= {"seed": seed, "stop": stop, "ignore_eos": ignore_eos}
    flags = {"model.name": model, "codec": codec, "server.state_file": state_file}
    there = RunningService(url, 0, api_key or "") if url else None
    try:
        with somewhere(there, config, sets, flags, body) as found:
            answer = persist(found, body, (lambda piece: None) if as_json else show)
    except KeyboardInterrupt as error:  # what was open is closed by now
        print(end="" if as_json else "\n")
        raise CancelledError("cancelled") from error
    if as_json:
        print_json(asdict(answer))
    else:
        print()
        print_savings(answer, max_tokens)


def read_prompt(text: str) -> str:
    """The prompt itself, or what "-" or "@FILE" point to; RequestError if it is empty."""
    try:
        if text == "-":
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the prompt {text}: {error}") from error
    if not text:
        raise RequestError("the prompt is empty; at least one token is wanted")
    return text


@contextmanager
def somewhere(
    given: RunningService | None,
    path: Path | None,
    sets: list[str] | None,
    flags: dict[str, Any],
    body: dict[str, Any],
) -> Iterator[RunningService]:
    """A service: the given one, the running one, or a private one for this prompt."""
    if given is not None:
        local = {"config": path, "set": sets, "state_file": flags["server.state_file"]}
        options.refuse_idle(given, "with --url, which names a service", **local)
        yield given
        return
    config = options.read_config(
        path, sets, {k: v and str(v) for k, v in flags.items()}
    )
    there = options.state_path(config.server.state_file)
    if path is not None or sets:
        if running := read_state(there):
            own = f"a service of its own with these settings; {running.url} has others"
            print(f"starting {own}", file=sys.stderr)
    elif running := ready(there):
        yield running
        return
    with private_service(config, body) as url:
        yield RunningService(url, os.getpid(), "")


def show(piece: str) -> None:
    """A piece of the answer, as soon as it is there."""
    try:
        print(piece, end="", flush=True)
    except OSError as error:
        told = f"nobody reads the answer any more: {error.strerror}"
        raise CancelledError(told) from error
