"""HTTP: routes, status codes, clients that disconnect. `responses.py` has the bodies.

POST /v1/completions · /v1/chat/completions; info_routes.py and admin.py have the other routes
"""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Sequence,
)
from contextlib import suppress
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from disagg.errors import CancelledError, DisaggError
from disagg.server.admin import WorkerPool, admin_routes
from disagg.server.auth import KeyRing
from disagg.server.choices import (
    MAX_PIECE,
    ChatChoices,
    Choices,
    CompletionChoices,
)
from disagg.server.completions import Completions
from disagg.server.gate import Gate
from disagg.server.info_routes import (
    add_info_routes,
    add_model_routes,
    add_tokenizer_routes,
)
from disagg.server.request_log import RequestLog
from disagg.server.responses import GenerationResponse, error_body
from disagg.server.schema import ChatRequest, CompletionRequest, GenerationRequest

STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would gather events
}
JSON = "application/json"
MAX_PATH_CHARS = 100  # of a path, in an error

T = TypeVar("T")


def create_app(
    completions: Completions,
    token: str | None = None,
    on_stop: Callable[[bool], None] = lambda now: None,
    keys: KeyRing | Collection[str] = (),
    worker_pool: WorkerPool | None = None,
    origins: Sequence[str] = (),
    is_stopping: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """The application.

    token: the owner's secret, for POST /stop, and for /scale and others if there is a
           `worker_pool`; None: without these routes
    on_stop: called for POST /stop, with whether requests get no time to end
    keys:  API keys of clients; the owner's secret is accepted too. Empty: no request needs a key
    origins: web origins whose pages may send requests and read responses; "*": all
    is_stopping: whether the service is shutting down, and so not ready
    """
    app = FastAPI(title="disagg", docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app, completions)
    _add_generation_routes(app, completions)
    add_info_routes(app, completions, worker_pool, is_stopping)
    add_model_routes(app, completions)
    add_tokenizer_routes(app, completions)
    if token is not None:
        app.include_router(admin_routes(token, on_stop, worker_pool))

    if not isinstance(keys, KeyRing):
        keys = KeyRing(keys, token)
    stack: ASGIApp = Gate(app, keys, origins, is_stopping, completions.spans)
    if origins:
        # outermost: preflight requests of browsers carry no key
        stack = CORSMiddleware(
            stack,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return RequestLog(stack)


def _add_generation_routes(app: FastAPI, completions: Completions) -> None:
    async def respond(
        http: Request,
        request: GenerationRequest,
        choices: Choices,
    ) -> Response:
        host, port = http.scope.get("server") or ("", 0)  # the address it came in at
        generation = await completions.prepare(request, port, http.state.client)
        deltas = completions.generate(generation)
        response = GenerationResponse(choices, generation, completions.served)
        http.state.log_fields = response.log_fields
        if generation.request.stream:
            first = await _unless_client_leaves(http, response.first(deltas))
            events = response.events(first, deltas)
            return StreamingResponse(events, 200, STREAM_HEADERS, "text/event-stream")
        whole = await _unless_client_leaves(http, response.whole(deltas))
        more = {}
        if generation.request.kv_transfer_params.do_remote_decode:
            (prompt,) = generation.prompts
            handle = completions.pd_ports.park(host, port, prompt.tokens)
            more["kv_transfer_params"] = handle
        return _json_response(response.pieces(whole, more))

    # the content type is ignored
    @app.post("/v1/completions")
    async def complete(http: Request) -> Response:
        request = await completions.read(CompletionRequest, http.stream())
        choices = CompletionChoices(completions.tokenizer)
        return await respond(http, request, choices)

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = await completions.read(ChatRequest, http.stream())
        choices = ChatChoices(
            completions.tokenizer,
            completions.new_call_id,
            names_call=request.tool_choice.is_named,
            shows_thoughts=request.include_reasoning,
        )
        return await respond(http, request, choices)


def _json_response(pieces: Iterator[bytes]) -> Response:
    """JSON in one body, or in many where it is long, so that others are served in between."""
    body = b""
    for piece in pieces:
        body += piece
        if len(body) > MAX_PIECE:
            return StreamingResponse(_unhurried(body, pieces), 200, media_type=JSON)
    return Response(body, 200, media_type=JSON)


async def _unhurried(first: bytes, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


async def _unless_client_leaves(http: Request, work: Awaitable[T]) -> T:
    """Await `work`; if the client disconnects first, cancel it and raise CancelledError."""

    async def disconnected() -> None:
        while True:
            message = await http.receive()
            if message["type"] == "http.disconnect":
                return

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CancelledError("the client left")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, DisaggError):
                await task


def _add_errors(app: FastAPI, completions: Completions) -> None:
    """Give every failure the body that the `openai` client expects."""

    @app.exception_handler(DisaggError)
    async def refused(http: Request, error: DisaggError) -> Response:
        if not hasattr(http.state, "log_fields"):  # else they include the error
            http.state.log_fields = lambda: {"error": error.reason}
        headers = None
        if error.http_status in (429, 503):
            headers = {"Retry-After": str(completions.retry_after_s())}
        body = error_body(str(error), error.reason, error.http_status, error.param)
        return JSONResponse(body, error.http_status, headers)

    @app.exception_handler(HTTPException)
    async def no_such_route(http: Request, error: HTTPException) -> Response:
        path = http.url.path[:MAX_PATH_CHARS]
        message = f"{error.detail}: {http.method} {path} is not a route of this service"
        body = error_body(message, "not_found", error.status_code)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def client_left(http: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CancelledError.http_status)

    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> Response:
        message = "internal error; the log of the service has its traceback"
        return JSONResponse(error_body(message, "internal", 500), 500)
