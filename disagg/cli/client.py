"""A client of the service over HTTP: JSON requests, and answers as server-sent events.

httpx is imported when a request is made: it takes a tenth of a second, and `--help` needs none.
"""

import json
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from disagg.cli.state_file import RunningService
from disagg.errors import ConfigError, PeerLostError, TransferError, error_from

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0
ANSWER_S = 15.0  # a service asks its workers for up to 5 s before it answers
RESUME_S, RETRY_S = 60.0, 0.2
EVENT_PREFIX = "data: "


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


def ignore(piece: str) -> None:
    """Show nothing of an answer while it arrives."""


def complete(
    service: RunningService,
    body: Mapping[str, Any],
    show: Callable[[str], None],
    show_thought: Callable[[str], None] = ignore,
) -> Answer:
    """Stream an answer to a `prompt` or to `messages`; `show` gets every piece of text.

    show_thought: gets every piece of what a model thinks before it answers a chat

    Leaving early cancels the request at the service.
    Raises the error that the service reports, or PeerLostError if the connection is lost.
    """
    is_chat = "messages" in body
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    request = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv": True,
    }
    answer = Answer()
    times = [time.monotonic()]
    with (
        _exchange(service, path, request, timeout_s=None) as response,
        understood(service),
    ):
        for event in _events(response):
            _add_event(answer, event, times, show, show_thought)
    if not answer.finish_reason:
        raise PeerLostError(
            f"the connection to {service.url} was lost in the middle of the answer"
        )
    answer.ttft_ms = 1e3 * (times[1] - times[0])
    answer.tpot_ms = 1e3 * (times[-1] - times[1]) / max(1, answer.completion_tokens - 1)
    return answer


def _add_event(
    answer: Answer,
    event: Mapping[str, Any],
    times: list[float],
    show: Callable[[str], None],
    show_thought: Callable[[str], None],
) -> None:
    if "error" in event:
        raise error_from(event["error"]["type"], event["error"]["message"])
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
    for choice in event["choices"]:
        times.append(time.monotonic())
        delta = choice.get("delta", {})
        show_thought(delta.get("reasoning_content") or "")
        text = choice.get("text") or delta.get("content") or ""
        answer.text += text
        answer.finish_reason = choice.get("finish_reason") or ""
        answer.kv = choice.get("kv") or answer.kv
        show(text)


def persist(
    service: RunningService,
    body: Mapping[str, Any],
    show: Callable[[str], None],
    show_thought: Callable[[str], None] = ignore,
) -> Answer:
    """Like `complete`, but repeat the request if the service is lost and comes back.

    The same seed gives the same answer; only its new part is shown. TransferError if the second
    answer differs from what was shown, PeerLostError if no service answers for RESUME_S.
    """
    shown = ""
    num_shown = 0  # characters of the thoughts
    seed = body.get("seed")
    body = {**body, "seed": secrets.randbits(31) if seed is None else seed}
    while True:
        received = ""
        num_received = 0

        def show_new(piece: str) -> None:
            nonlocal received, shown
            received += piece
            if not (received.startswith(shown) or shown.startswith(received)):
                raise TransferError(
                    "the connection was lost, and the repeated answer differs from the text "
                    "already shown"
                )
            new = received[len(shown) :]
            if new:
                shown = received
                show(new)

        def show_new_thought(piece: str) -> None:
            nonlocal num_received, num_shown
            new = piece[max(0, num_shown - num_received) :]
            num_received += len(piece)
            num_shown = max(num_shown, num_received)
            if new:
                show_thought(new)

        try:
            return complete(service, body, show_new, show_new_thought)
        except PeerLostError:
            if not (shown or num_shown) or not _comes_back(service):
                raise


def _comes_back(service: RunningService) -> bool:
    """Whether the service was lost, and answers again within RESUME_S."""
    was_lost = False
    deadline = time.monotonic() + RESUME_S
    while time.monotonic() < deadline:
        try:
            get(service, "/health")
        except PeerLostError:
            was_lost = True
            time.sleep(RETRY_S)
        else:
            return was_lost
    return False


def get(service: RunningService, path: str) -> dict[str, Any]:
    """The JSON object at a path."""
    return _json_of(service, path, None)


def post(
    service: RunningService, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON object that answers a POST; only the owner of the service may send one."""
    return _json_of(service, path, body or {})


def _json_of(
    service: RunningService, path: str, body: Mapping[str, Any] | None
) -> dict[str, Any]:
    with _exchange(service, path, body, ANSWER_S) as response:
        problem = f"the answer of {service.url} is not JSON; is it a disagg service?"
        return _object(response.read(), problem)


@contextmanager
def _exchange(
    service: RunningService,
    path: str,
    body: Mapping[str, Any] | None,
    timeout_s: float | None,
) -> "Iterator[httpx.Response]":
    """A response with a good status, to a POST if there is a body; closed on every way out."""
    import httpx

    parts = _parts(service.url)
    base = parts.path.rstrip("/").removesuffix(
        "/v1"
    )  # the address of the API is fine too
    url = f"{parts.scheme}://{parts.netloc}{base}{path}"
    headers = {"Content-Type": "application/json"}
    if service.token:
        headers["Authorization"] = f"Bearer {service.token}"
    method = "GET" if body is None else "POST"
    content = None if body is None else json.dumps(body)
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
    trust = _trust(service.certificate) if parts.scheme == "https" else False
    try:
        with (
            httpx.Client(verify=trust, timeout=timeout, trust_env=False) as client,
            client.stream(method, url, content=content, headers=headers) as response,
        ):
            if response.status_code >= 400:
                raise _error(service.url, response.status_code, response.read())
            yield response
    except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ConfigError(
            f"the request cannot be sent to {service.url}: {error}"
        ) from error
    except httpx.TransportError as error:
        hint = _hint(error, parts.scheme)
        raise PeerLostError(
            f"no service answers at {service.url}: {error}{hint}"
        ) from error


def _hint(error: Exception, scheme: str) -> str:
    """The likely cause of a transport error, to be added to its message."""
    import httpx

    causes: list[BaseException] = [error]
    while causes[-1].__cause__ or causes[-1].__context__:
        causes.append(causes[-1].__cause__ or causes[-1].__context__)  # type: ignore[arg-type]
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return "; SSL_CERT_FILE=FILE names a certificate to trust"
    if any(type(cause) is ssl.SSLError for cause in causes):
        return "; does it speak http?"
    if scheme == "http" and isinstance(error, httpx.RemoteProtocolError):
        return "; does it speak https?"
    return ""


def _trust(certificate: str | None) -> ssl.SSLContext:
    """Trust the authorities of this host, or only one certificate, for any host name."""
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
    """Raise PeerLostError if reading an answer fails because it lacks what was expected."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise PeerLostError(
            f"unexpected answer from {service.url}; is it a disagg service? ({error!r})"
        ) from error


def _parts(url: str) -> SplitResult:
    """A URL in parts; ConfigError for one that no service can have."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port  # ValueError for a port that is no number or too large
    except ValueError as error:
        raise ConfigError(f"{url!r} is not the URL of a service: {error}") from error
    is_http = parts.scheme in ("http", "https")
    if not is_http or not host or not host.isprintable() or " " in host:
        raise ConfigError(
            f"{url!r} is not the URL of a service; expected http://host:port"
        )
    return parts


def _error(url: str, status: int, body: bytes) -> Exception:
    try:
        error = json.loads(body)["error"]
        if error["type"] != "not_found":
            return error_from(error["type"], error["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return PeerLostError(f"{url} answers with status {status}; is it a disagg service?")


def _object(data: str | bytes, problem: str) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise PeerLostError(problem) from error


def _events(response: "httpx.Response") -> Iterator[dict[str, Any]]:
    """The JSON objects of server-sent events, up to [DONE]."""
    for line in response.iter_lines():
        data = line.strip().removeprefix(EVENT_PREFIX)
        if data == "[DONE]":
            return
        if data and not data.startswith(":"):
            problem = f"{data[:80]!r} is not part of an answer; is it a disagg service?"
            yield _object(data, problem)
