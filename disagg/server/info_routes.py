"""Models, health, status, metrics, the live page, and the tokenizer."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from disagg import __version__
from disagg.errors import RequestError
from disagg.model.describe import DEFAULT_MODEL
from disagg.server.admin import WorkerPool
from disagg.server.completions import Completions
from disagg.server.schema import DetokenizeRequest, TokenizeRequest

LIVE_PAGE = Path(__file__).parent / "live.html"
GET = ["GET", "HEAD"]  # load balancers send HEAD requests
METRICS_TYPE = "text/plain; version=0.0.4"


def add_info_routes(
    app: FastAPI,
    completions: Completions,
    worker_pool: WorkerPool | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """GET / · /health · /ready · /version · /status · /metrics."""
    router = completions.router
    get_route = partial(app.api_route, methods=GET)

    @get_route("/")
    async def live() -> Response:
        return FileResponse(LIVE_PAGE)

    @get_route("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @get_route("/ready")
    async def ready() -> Response:
        if is_stopping():
            return JSONResponse({"status": "stopping"}, 503)
        if router.ready:
            return JSONResponse({"status": "ok"})
        target = {} if worker_pool is None else worker_pool.target_counts
        return JSONResponse({"status": "starting", "lacks": router.lacks(target)}, 503)

    @get_route("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @get_route("/status")
    async def status() -> Response:
        body = await completions.status()
        if worker_pool is not None:
            body["wanted"] = worker_pool.target_counts
            if worker_pool.lacks_room:
                body["lacks_room"] = dict(worker_pool.lacks_room)
        return JSONResponse(body)

    @get_route("/metrics")
    async def metrics() -> Response:
        return Response(await completions.scrape(), media_type=METRICS_TYPE)


def add_model_routes(app: FastAPI, completions: Completions) -> None:
    """GET /v1/models · /v1/models/{id}."""
    served = completions.served
    model = {
        "id": served.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "disagg",
        "root": served.alias or DEFAULT_MODEL.name,
        "max_model_len": served.context_length,
        "default_sampling_params": served.defaults,
        **completions.reader.formats.names,
    }
    get_route = partial(app.api_route, methods=GET)

    @get_route("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @get_route("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if not name:
            return await models()
        completions.reader.check_model(name)
        return JSONResponse(model)


def add_tokenizer_routes(app: FastAPI, completions: Completions) -> None:
    """POST /tokenize · /detokenize, the same as vLLM's."""
    tokenizer = completions.tokenizer

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        request = await completions.reader.read(TokenizeRequest, http.stream())
        if (request.prompt is None) == (not request.messages):
            raise RequestError("expected a prompt or messages, and not both", "prompt")
        if request.prompt is None:
            tokens = await completions.reader.chat_tokens(request)
        else:
            special = request.add_special_tokens is not False
            tokens = await completions.reader.tokens_of(request.prompt, special)
        token_strs = None
        if request.return_token_strs:
            token_strs = await asyncio.to_thread(
                lambda: [tokenizer.spell(token) for token in tokens]
            )
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": completions.served.context_length,
                "tokens": tokens,
                "token_strs": token_strs,
            }
        )

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request = await completions.reader.read(DetokenizeRequest, http.stream())
        return JSONResponse(
            {"prompt": await completions.reader.text_of(request.tokens)}
        )
