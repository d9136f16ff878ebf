"""HTTP: routes, server-sent events, statuses. What an answer is made of is `completions.py`.

POST /v1/completions · GET /v1/models · GET /health · GET /metrics · GET /status · POST /stop
"""

import asyncio
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disagg.errors import CancelledError, DisaggError
from disagg.server.admin import Staff, admin_routes
from disagg.server.completions import Completions
from disagg.server.schema import Choice, CompletionBody, CompletionRequest, Usage, error_body
from disagg.server.text import Piece

DONE = "data: [DONE]\n\n"
RETRY_AFTER_S = "1"
MAX_PATH_SHOWN = 100
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def create_app(
    completions: Completions,
    token: str | None = None,
    on_stop: Callable[[], None] = lambda: None,
    staff: Staff | None = None,
) -> ASGIApp:
    """The application. `token`: what its owner carries; without it nobody stops or scales it."""
    app = FastAPI(title="disagg", docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    _add_views(app, completions)
    if staff is not None and token is not None:
        app.include_router(admin_routes(staff, token))

    @app.post("/v1/completions")
    async def complete(http: Request) -> Response:
        request, tokens = await completions.prepare(http.stream())  # of any content type
        reply = Reply(completions, request, tokens)
        if request.stream:
            first = await reply.begin(http)
            return StreamingResponse(reply.events(first), media_type="text/event-stream")
        return JSONResponse(await reply.whole(http))

    @app.post("/stop")
    async def stop(http: Request) -> Response:
        given = http.headers.get("authorization", "")
        if token is None or not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return JSONResponse(error_body("the token is missing or wrong", "auth", 401), 401)
        on_stop()
        return JSONResponse({"stopping": True})

    return RequestIds(app)


class RequestIds:
    """Every response carries the X-Request-Id of its request, or a new one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        given = dict(scope.get("headers", ())).get(b"x-request-id", b"")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
            await send(message)

        await self._app(scope, receive, named)


class Reply:
    """One completion on its way to one client; a client that leaves takes it along."""

    def __init__(
        self, completions: Completions, request: CompletionRequest, tokens: tuple[int, ...]
    ):
        self._pieces = completions.stream(request, tokens)
        self._request = request
        self._prompt_tokens = len(tokens)
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = completions.served.name

    async def begin(self, http: Request) -> Piece:
        """The first piece, before any status is sent: what fails until then has its own."""
        return await _unless_left(http, anext(self._pieces))

    async def events(self, first: Piece) -> AsyncIterator[str]:
        """Server-sent events, the last one "[DONE]"; an error in mid-stream is an event too."""
        piece = first
        try:
            async with aclosing(self._pieces):
                while piece.finish_reason is None:
                    if piece.text:
                        yield self._body(piece).chunk()
                    piece = await anext(self._pieces)
        except DisaggError as error:
            body = error_body(str(error), error.reason, error.http_status)
            yield f"data: {json.dumps(body)}\n\n"
        else:
            last = self._body(piece)
            yield last.chunk()
            if self._request.stream_options.include_usage:
                usage = {"choices": [], "usage": self._usage(piece), "kv": None}
                yield last.model_copy(update=usage).chunk()
        yield DONE

    async def whole(self, http: Request) -> dict[str, Any]:
        """The answer as one body."""

        async def collect() -> tuple[str, Piece]:
            texts = []
            async with aclosing(self._pieces):
                async for piece in self._pieces:
                    texts.append(piece.text)
            return "".join(texts), piece

        text, last = await _unless_left(http, collect())
        whole = self._body(replace(last, text=text))
        return whole.model_copy(update={"usage": self._usage(last)}).body()

    def _body(self, piece: Piece) -> CompletionBody:
        wanted = self._request.kv and piece.finish_reason is not None
        return CompletionBody(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[Choice(text=piece.text, finish_reason=piece.finish_reason)],
            kv=dict(piece.kv) if wanted else None,
        )

    def _usage(self, piece: Piece) -> Usage:
        prompt, answer = self._prompt_tokens, piece.num_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)


async def _unless_left(http: Request, work: Any) -> Any:
    """The result of `work`; CancelledError, with the work cancelled, if the client goes first."""

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
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


def _add_errors(app: FastAPI) -> None:
    """Whatever goes wrong has the body that the `openai` client reads."""

    @app.exception_handler(DisaggError)
    async def refused(request: Request, error: DisaggError) -> Response:
        headers = {"Retry-After": RETRY_AFTER_S} if error.http_status == 503 else None
        body = error_body(str(error), error.reason, error.http_status, error.param)
        return JSONResponse(body, error.http_status, headers)

    @app.exception_handler(HTTPException)
    async def missing(http: Request, error: HTTPException) -> Response:
        path = http.url.path[:MAX_PATH_SHOWN]
        message = f"{error.detail}: {http.method} {path} is nothing this service does"
        body = error_body(message, "not_found", error.status_code)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def left(http: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CancelledError.http_status)  # nobody reads it

    @app.exception_handler(Exception)
    async def broken(http: Request, error: Exception) -> Response:
        message = "the service failed; its log says why"
        return JSONResponse(error_body(message, "internal", 500), 500)


def _add_views(app: FastAPI, completions: Completions) -> None:
    served, router = completions.served, completions.router

    @app.get("/health")
    async def health() -> Response:
        status = 200 if router.ready else 503
        return JSONResponse({"status": "ok" if router.ready else "starting"}, status)

    @app.get("/v1/models")
    async def models() -> Response:
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "disagg"}
        model["max_model_len"] = served.context_length
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/status")
    async def status() -> Response:
        return JSONResponse(await completions.status())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await completions.scrape(), media_type="text/plain; version=0.0.4")
