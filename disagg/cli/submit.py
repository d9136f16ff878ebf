"""`disagg submit`: send one prompt, print the answer and what the hand-off saved."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typer import Argument, Option, secho

from disagg.cli import options
from disagg.cli.client import get, ignore, persist, understood
from disagg.cli.output import print_json, print_savings, tell
from disagg.cli.serve import private_service, ready
from disagg.cli.state_file import RunningService, read_state
from disagg.errors import CancelledError, RequestError

PACKAGED_HINT = (
    "note: the packaged model continues text and cannot chat; try --model smollm2"
)


def submit(
    text: str = Argument(
        ..., help='The prompt; "-" reads standard input, "@FILE" a file.'
    ),
    url: str | None = Option(
        None, help="URL of a service; default: the running one, else a private one."
    ),
    model: options.Model = None,
    codec: options.Codec = None,
    max_tokens: int = Option(64, help="Tokens to generate; -1: as many as fit."),
    temperature: float | None = Option(
        None,
        min=0.0,
        help="Sampling temperature; default: the model's, else 0: greedy.",
    ),
    top_p: float | None = Option(
        None, help="Sample from the smallest set with this probability."
    ),
    top_k: int | None = Option(
        None, min=0, help="Sample from the k most likely tokens; 0: all."
    ),
    seed: int | None = Option(None, min=0, help="Seed for repeatable sampling."),
    stop: list[str] | None = Option(
        None, help="Stop before this text; may be repeated."
    ),
    ignore_eos: bool = Option(False, help="Continue past the end-of-text token."),
    chat: bool = Option(False, "--chat", help="Send it as a chat message."),
    chat_template: options.ChatTemplate = None,
    api_key: options.ApiKey = None,
    config: options.ConfigFile = None,
    sets: options.Set = None,
    state_file: options.StateFile = None,
    as_json: options.Json = False,
) -> None:
    """Generate an answer with the running service or a private one."""
    options.refuse_idle(not chat, "without --chat", chat_template=chat_template)
    prompt = read_prompt(text)
    request = {"prompt": prompt}
    if chat:
        request = {"messages": [{"role": "user", "content": prompt}]}  # type: ignore[dict-item]
    body = {
        **request,
        "model": model,
        "codec": codec,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
        "ignore_eos": ignore_eos,
    }
    flags = {
        "model.name": model,
        "codec": codec,
        "server.chat_template": chat_template,
        "server.state_file": state_file and str(state_file),
    }
    service_at_url = RunningService(url, 0, api_key or "") if url else None
    printed = PrintedAnswer()
    shows = (ignore, ignore) if as_json else (printed.content, printed.thought)
    try:
        with find_service(service_at_url, config, sets, flags, body) as service:
            answer = persist(service, with_temperature(service, body), *shows)
    except KeyboardInterrupt as error:  # connections and services are closed by now
        print(end="" if as_json else "\n")
        raise CancelledError("cancelled") from error
    if as_json:
        print_json(asdict(answer))
    else:
        print()
        print_savings(answer, max_tokens)


def with_temperature(service: RunningService, body: dict[str, Any]) -> dict[str, Any]:
    """Greedy, unless the user or the model's authors name a temperature."""
    if body["temperature"] is not None:
        return body
    reply = get(service, "/v1/models")
    with understood(service):
        defaults = reply["data"][0].get("default_sampling_params", {})
        is_greedy = "temperature" not in defaults
    return {**body, "temperature": 0.0} if is_greedy else body


def read_prompt(text: str) -> str:
    """The prompt itself, or what "-" or "@FILE" points to; RequestError if it is empty."""
    try:
        if text == "-":
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the prompt {text}: {error}") from error
    if not text:
        raise RequestError("the prompt is empty; expected at least one token")
    return text


@contextmanager
def find_service(
    service_at_url: RunningService | None,
    path: Path | None,
    sets: list[str] | None,
    flags: dict[str, Any],
    body: dict[str, Any],
) -> Iterator[RunningService]:
    """The service at --url, the running one, or a private one for this prompt."""
    if service_at_url is not None:
        local = {
            "config": path,
            "set": sets,
            "state_file": flags["server.state_file"],
            "chat_template": flags["server.chat_template"],
        }
        options.refuse_idle(True, "with --url, which names a service", **local)
        yield service_at_url
        return
    config = options.read_config(path, sets, flags)
    state_path = options.state_path(config.server.state_file)
    has_settings = any((path, sets, flags["server.chat_template"]))
    running = read_state(state_path) if has_settings else ready(state_path)
    if running and not has_settings:
        yield running
        return
    if running:
        tell(
            "starting a private service with these settings; "
            f"the running one at {running.url} has others"
        )
    if "messages" in body and config.model.name is None:
        tell(PACKAGED_HINT)
    with private_service(config, body) as url:
        yield RunningService(url, os.getpid(), "")


def print_piece(piece: str) -> None:
    """Print a piece of the answer as soon as it arrives."""
    try:
        print(piece, end="", flush=True)
    except OSError as error:
        problem = f"standard output is closed: {error.strerror}"
        raise CancelledError(problem) from error


class PrintedAnswer:
    """Prints an answer while it arrives: its thoughts to standard error, dimmed on a terminal."""

    def __init__(self) -> None:
        self._in_thought = False

    def thought(self, piece: str) -> None:
        if piece:
            self._in_thought = True
            secho(piece, dim=True, nl=False, err=True)

    def content(self, piece: str) -> None:
        if piece and self._in_thought:
            self._in_thought = False
            secho(err=True)
        print_piece(piece)
