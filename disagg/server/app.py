"""HTTP: routes, statuses, and clients that leave. What an answer is made of is `reply.py`.

POST /v1/completions · /v1/chat/completions; views.py and admin.py have the rest
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from disagg.errors import CancelledError, DisaggError
from disagg.server.access import AuthMiddleware
from disagg.server.admin import WorkerPool, admin_routes
from disagg.server.answers import ChatAnswer, CompletionAnswer, error_body
from disagg.server.completions import Completions
from disagg.server.info_routes import add_tokens, add_views
from disagg.server.reply import Answers, Reply
from disagg.server.schema import ChatRequest, CompletionRequest, GenerationRequest

RETRY_AFTER_S = "1"
AT_ONCE = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}  # nginx would gather events
MAX_PATH_SHOWN = 100


def create_app(
    completions: Completions,
    token: str | None = None,
    on_stop: Callable[[], None] = lambda: None,
    keys: Collection[str] = (),
    staff: WorkerPool | None = None,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """The application.

    token: the secret of its owner, for POST /stop, and /scale and others where there is `staff`,
           who has the workers; None: there are no such routes
    keys:  of clients; the owner's secret is as good as one. None: everybody is served
    origins: whose pages browsers let read the answers; "*": of all
    """
    app = FastAPI(title="disagg", docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    add_views(app, completions, staff)
    add_tokens(app, completions)
    if token is not None:
        app.include_router(admin_routes(token, on_stop, staff))

    async def answer(
        http: Request, form: type[GenerationRequest], answer: Answers
    ) -> Response:
        host, port = http.scope.get("server") or ("", 0)  # where it came in
        # of any content type
        request, prompts = await completions.prepare(form, http.stream(), port)
        reply = Reply(completions, request, prompts, answer)
        if request.stream:
            first = await _unless_left(http, reply.begin())
            return StreamingResponse(
                reply.events(first), 200, AT_ONCE, "text/event-stream"
            )
        whole = await _unless_left(http, reply.whole())
        if request.kv_transfer_params.do_remote_decode:
            parked = completions.doors.park(host, port, prompts[0].tokens)
            whole |= {"kv_transfer_params": parked}
        return JSONResponse(whole)

    @app.post("/v1/completions")
    async def complete(http: Request) -> Response:
        return await answer(http, CompletionRequest, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        return await answer(http, ChatRequest, ChatAnswer)

    guarded = AuthMiddleware(app, [*keys, *([token] if token else [])] if keys else ())
    if not origins:
        return guarded
    every, shown = (
        ["*"],
        ["x-request-id"],
    )  # outside: browsers ask first, and show no key then
    return CORSMiddleware(guarded, origins, every, every, expose_headers=shown)


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
        headers = (
            {"Retry-After": RETRY_AFTER_S} if error.http_status in (429, 503) else None
        )
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
