"""HTTP: routes, status codes, clients that disconnect. Writers have the bodies.

POST /v1/completions · /v1/chat/completions · /v1/responses
info_routes.py and admin.py have the other routes
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
from functools import partial
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
    CompletionChoices,
)
from disagg.server.choices_writer import ChoicesWriter
from disagg.server.completions import Completions
from disagg.server.gate import Gate
from disagg.server.info_routes import (
    add_info_routes,
    add_model_routes,
    add_tokenizer_routes,
)
from disagg.server.items_writer import ItemsWriter
from disagg.server.reader import Generation
from disagg.server.request_log import RequestLog
from disagg.server.responses import ResponseWriter, error_body
from disagg.server.responses_request import ResponsesRequest, translate
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
    _add_response_routes(app, completions)
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


# Each route is a dialect: how a request is read, and how its response is written. The content type
# is ignored.


def _add_generation_routes(app: FastAPI, completions: Completions) -> None:
    @app.post("/v1/completions")
    async def complete(http: Request) -> Response:
        request = await completions.read(CompletionRequest, http.stream())
        choices = CompletionChoices(completions.tokenizer)
        writer_of = partial(ChoicesWriter, choices, served=completions.served)
        return await _respond(http, completions, request, writer_of)

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = await completions.read(ChatRequest, http.stream())
        choices = ChatChoices(
            completions.tokenizer,
            completions.new_call_id,
            names_call=request.tool_choice.is_named,
            shows_thoughts=request.include_reasoning,
        )
        writer_of = partial(ChoicesWriter, choices, served=completions.served)
        return await _respond(http, completions, request, writer_of)


def _add_response_routes(app: FastAPI, completions: Completions) -> None:
    @app.post("/v1/responses")
    async def create_response(http: Request) -> Response:
        request = await completions.read(ResponsesRequest, http.stream())
        writer_of = partial(
            ItemsWriter,
            request,
            served=completions.served,
            tokenizer=completions.tokenizer,
            new_call_id=completions.new_call_id,
        )
        try:
            return await _respond(http, completions, request.chat, writer_of)
        except DisaggError as error:
            translate(error)
            raise

    @app.get("/v1/responses/{id}")
    @app.delete("/v1/responses/{id}")
    async def not_stored(id: str) -> Response:
        message = (
            "responses are not stored here: store is false in each of them; "
            "send its items as input of the next request"
        )
        return JSONResponse(error_body(message, "not_found", 404), 404)

    @app.post("/v1/responses/{name}")
    async def no_such_operation(name: str) -> Response:
        raise HTTPException(404)  # not 405, which clients take for a wrong method


async def _respond(
    http: Request,
    completions: Completions,
    request: GenerationRequest,
    writer_of: Callable[[Generation], ResponseWriter],
) -> Response:
    host, port = http.scope.get("server") or ("", 0)  # the address it came in at
    generation = await completions.prepare(request, port, http.state.client)
    deltas = completions.generate(generation)
    writer = writer_of(generation)
    http.state.log_fields = writer.log_fields
    if generation.request.stream:
        first = await _unless_client_leaves(http, writer.first(deltas))
        events = writer.events(first, deltas)
        return StreamingResponse(events, 200, STREAM_HEADERS, "text/event-stream")
    await _unless_client_leaves(http, writer.gather(deltas))
    more = {}
    if generation.request.kv_transfer_params.do_remote_decode:
        (prompt,) = generation.prompts
        handle = completions.pd_ports.park(host, port, prompt.tokens)
        more["kv_transfer_params"] = handle
    return _json_response(writer.pieces(more))


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
