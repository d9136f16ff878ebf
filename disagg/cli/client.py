"""A client of the service: the state file that tells where it is, and how it is asked.

HTTP and server-sent events with the standard library alone.
"""

import json
import os
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from http.client import (
    BadStatusLine,
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
)
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from disagg.errors import ConfigError, PeerLostError, TransferError, error_from
from disagg.launch.reaper import birth

CONNECT_S = 5.0
ANSWER_S = 15.0  # a service asks its workers for 5 s before it answers for them
RESUME_S, RETRY_S = 60.0, 0.2


@dataclass(frozen=True)
class RunningService:
    """A running service. `ready`: its workers serve.

    token:       an API key; that of the state file is what POST /stop asks for, and as good as one
    certificate: of its HTTPS, to be trusted; a file
    grace_s:     how long its workers may finish what they have when it stops
    born:        when its process started; None: unknown. Another one may have its number by now
    """

    url: str
    pid: int
    token: str
    certificate: str | None = None
    grace_s: float = 5.0
    ready: bool = False
    born: str | None = None

    @property
    def alive(self) -> bool:
        """Whether its process exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.born in (None, birth(self.pid))


def write_state(path: Path, state: RunningService) -> None:
    """Readable by this user alone from its first byte on, and whole when it appears."""
    begun = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        begun.unlink(missing_ok=True)
        with os.fdopen(
            os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as file:
            json.dump(asdict(state), file)
        begun.replace(path)
    except OSError as error:
        with suppress(OSError):
            begun.unlink()
        raise ConfigError(
            f"state file {path} cannot be written: {error.strerror}"
        ) from error


def check_unannounced(path: Path) -> None:
    """ConfigError if a state file tells of a service that runs: nobody else could find it then."""
    there = read_state(path)
    if there is not None:
        raise ConfigError(
            f"a service runs at {there.url} (process {there.pid}), says {path}; `disagg stop` ends "
            "it, --state-file FILE --port PORT starts another one beside it"
        )


@contextmanager
def announced(path: Path, state: RunningService) -> Iterator[Callable[[], None]]:
    """The state file exists inside this block; one that somebody else wrote meanwhile stays.

    Gives what is to be called when the service is ready.
    """
    check_unannounced(path)
    write_state(path, state)
    try:
        yield lambda: write_state(path, replace(state, ready=True))
    finally:
        there = read_state(path)
        if there is not None and replace(there, ready=state.ready) == state:
            path.unlink(missing_ok=True)


def read_state(path: Path) -> RunningService | None:
    """The service of a state file, if it runs. ConfigError for a file that others could write."""
    state = _state_of(path)
    return state if state and state.alive else None


def left_token(path: Path) -> str | None:
    """Of a service that was killed: its clients, who resume at the next one, have it still."""
    state = _state_of(path)
    return state.token if state else None


def _state_of(path: Path) -> RunningService | None:
    try:
        found = path.stat()
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"state file {path} cannot be read: {error}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"state file {path} belongs or is open to others; remove it")
    try:
        state = RunningService(**json.loads(text))
        # to signal 0 or -1 is to signal many processes
        if (
            type(state.pid) is not int
            or not 0 < state.pid < 1 << 31
            or type(state.url) is not str
        ):
            raise ValueError(f"no process {state.pid!r} is at {state.url!r}")
        return state
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"state file {path} cannot be read: {error}; remove it"
        ) from error


@dataclass
class Answer:
    """A completion as a client saw it. Milliseconds from sending the request."""

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    kv: Mapping[str, Any] = field(default_factory=dict)


def complete(
    service: RunningService, body: Mapping[str, Any], show: Callable[[str], None]
) -> Answer:
    """Stream an answer to a `prompt` or to `messages`; `show` gets every piece of text.

    Closing early cancels it there.
    Raises the error that the service named, or PeerLostError where there is none.
    """
    wanted = {"stream": True, "stream_options": {"include_usage": True}, "kv": True}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer, times = Answer(), [time.monotonic()]
    sent = dict(body) | wanted
    with (
        _exchange(service, path, sent, timeout_s=None) as response,
        understood(service),
    ):
        for event in _events(response):
            if "error" in event:
                raise error_from(event["error"]["type"], event["error"]["message"])
            if usage := event.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.completion_tokens = usage["completion_tokens"]
            for choice in event["choices"]:
                times.append(time.monotonic())
                text = choice.get("text") or choice.get("delta", {}).get("content", "")
                answer.text += text
                answer.finish_reason = choice.get("finish_reason") or ""
                show(text)
                answer.kv = choice.get("kv") or answer.kv
    if not answer.finish_reason:
        raise PeerLostError(f"the answer of {service.url} broke off")
    answer.ttft_ms = 1e3 * (times[1] - times[0])
    answer.tpot_ms = 1e3 * (times[-1] - times[1]) / max(1, answer.completion_tokens - 1)
    return answer


def persist(
    service: RunningService, body: Mapping[str, Any], show: Callable[[str], None]
) -> Answer:
    """`complete`, once more where the service is lost in the middle and comes back.

    The same seed makes the same answer, which is shown from where it broke off. TransferError if it
    comes out otherwise, PeerLostError if nobody answers for RESUME_S.
    """
    shown, seed = "", body.get("seed")
    body = {**body, "seed": secrets.randbits(31) if seed is None else seed}
    while True:
        said = ""

        def tell(piece: str) -> None:
            nonlocal said, shown
            said += piece
            if not (said.startswith(shown) or shown.startswith(said)):
                raise TransferError("the answer broke off, and comes out otherwise now")
            if new := said[len(shown) :]:
                shown = said
                show(new)

        try:
            return complete(service, body, tell)
        except PeerLostError:
            if not shown or not _comes_back(service):
                raise


def _comes_back(service: RunningService) -> bool:
    """Whether a service is gone, and there again soon."""
    gone, until = False, time.monotonic() + RESUME_S
    while time.monotonic() < until:
        try:
            get(service, "/health")
        except PeerLostError:
            gone = True
            time.sleep(RETRY_S)
        else:
            return gone
    return False


def get(service: RunningService, path: str) -> dict[str, Any]:
    """The JSON object at a path."""
    return _ask(service, path, None)


def post(
    service: RunningService, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Ask for something that only the owner of the service may ask for."""
    return _ask(service, path, body or {})


def _ask(
    service: RunningService, path: str, body: Mapping[str, Any] | None
) -> dict[str, Any]:
    with _exchange(service, path, body, ANSWER_S) as response:
        no_json = f"{service.url} does not answer with JSON; is it a disagg service?"
        return _object(response.read(), no_json)


@contextmanager
def _exchange(
    service: RunningService,
    path: str,
    body: Mapping[str, Any] | None,
    timeout_s: float | None,
) -> Iterator[HTTPResponse]:
    """A response with a good status, to a POST if there is a body; closed on every way out."""
    parts, host, port = _address(service.url)
    connection = HTTPConnection(host, port, timeout=CONNECT_S)
    if parts.scheme == "https":
        trust = _trust(service.certificate)
        connection = HTTPSConnection(host, port, timeout=CONNECT_S, context=trust)
    headers = {"Content-Type": "application/json"}
    if service.token:
        headers["Authorization"] = f"Bearer {service.token}"
    try:
        connection.connect()
        connection.sock.settimeout(timeout_s)
        method, payload = ("GET", None) if body is None else ("POST", json.dumps(body))
        base = parts.path.rstrip("/").removesuffix(
            "/v1"
        )  # some write the address of the API
        try:
            connection.request(method, base + path, payload, headers)
        except ValueError as error:  # a key or a path that HTTP cannot carry
            raise ConfigError(f"{service.url} cannot be asked so: {error}") from error
        response = connection.getresponse()
        if response.status >= 400:
            raise _error(service.url, response.status, response.read())
        yield response
    except (OSError, HTTPException) as error:
        hint, plain = "", parts.scheme == "http"
        if isinstance(error, BadStatusLine) if plain else type(error) is ssl.SSLError:
            hint = f"; does it speak {'https' if plain else 'http'}?"
        elif isinstance(error, ssl.SSLCertVerificationError):
            hint = "; SSL_CERT_FILE=FILE names whom to trust"
        raise PeerLostError(
            f"no service answers at {service.url}: {error}{hint}"
        ) from error
    finally:
        connection.close()


def _trust(certificate: str | None) -> ssl.SSLContext:
    """Trust in what this host trusts; or in one certificate, whatever name it has."""
    try:
        trust = ssl.create_default_context(cafile=certificate)
    except OSError as error:
        raise ConfigError(
            f"certificate {certificate!r} cannot be read: {error}"
        ) from error
    if certificate is not None:
        trust.check_hostname = False
        trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return trust


@contextmanager
def understood(service: RunningService) -> Iterator[None]:
    """PeerLostError where what it said in JSON is not what such a service says."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:
        told = f"{service.url} answers otherwise than expected; is it a disagg service?"
        raise PeerLostError(f"{told} ({error!r})") from error


def _address(url: str) -> tuple[SplitResult, str, int | None]:
    """A URL in parts, its host and its port; ConfigError for what is no URL of a service."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL of a service: {error}") from error
    if (
        parts.scheme not in ("http", "https")
        or not host
        or not host.isprintable()
        or " " in host
    ):
        raise ConfigError(f"{url!r} is no URL of a service; write http://host:port")
    return parts, host, port


def _error(url: str, status: int, body: bytes) -> Exception:
    try:
        error = json.loads(body)["error"]
        if error["type"] != "not_found":
            return error_from(error["type"], error["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return PeerLostError(f"{url} answers with status {status}; is it a disagg service?")


def _object(data: str | bytes, otherwise: str) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise PeerLostError(otherwise) from error


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of server-sent events, up to [DONE]."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield _object(data, f"the answer was cut short: {data[:80]!r} is no event")
