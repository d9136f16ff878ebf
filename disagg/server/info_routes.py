"""What the service tells of itself: models, health, figures, tokens, and the live page."""

import asyncio
import time
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


def add_views(
    app: FastAPI, completions: Completions, staff: WorkerPool | None = None
) -> None:
    """GET / · /health · /ready · /version · /v1/models · /v1/models/{id} · /status · /metrics."""
    served, router = completions.served, completions.router
    model = {"id": served.name, "object": "model", "created": int(time.time())}
    model |= {"owned_by": "disagg", "root": served.alias or DEFAULT_MODEL.name}
    model |= {"max_model_len": served.context_length}
    read = partial(
        app.api_route, methods=["GET", "HEAD"]
    )  # load balancers ask for heads

    @read("/")
    async def live() -> Response:
        return FileResponse(LIVE_PAGE)

    @read("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @read("/ready")
    async def ready() -> Response:
        if router.ready:
            return JSONResponse({"status": "ok"})
        lacks = router.lacks({} if staff is None else staff.wanted)
        return JSONResponse({"status": "starting", "lacks": lacks}, 503)

    @read("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @read("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @read("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if not name:
            return await models()
        completions.check_model(name)
        return JSONResponse(model)

    @read("/status")
    async def status() -> Response:
        wanted = {} if staff is None else {"wanted": staff.wanted}
        return JSONResponse(await completions.status() | wanted)

    @read("/metrics")
    async def metrics() -> Response:
        return Response(
            await completions.scrape(), media_type="text/plain; version=0.0.4"
        )


def add_tokens(app: FastAPI, completions: Completions) -> None:
    """POST /tokenize · /detokenize: as vLLM has them."""

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        request = await completions.read(TokenizeRequest, http.stream())
        if (request.prompt is None) == (not request.messages):
            raise RequestError(
                "a prompt or messages are wanted, and not both", "prompt"
            )
        if request.prompt is None:
            tokens = await completions.chat_tokens(request)
        else:
            special = request.add_special_tokens is not False
            tokens = await completions.tokens_of(request.prompt, special)
        texts = None
        if request.return_token_strs:
            texts = await asyncio.to_thread(
                lambda: [*map(completions.tokenizer.spell, tokens)]
            )
        told = {
            "count": len(tokens),
            "max_model_len": completions.served.context_length,
        }
        return JSONResponse(told | {"tokens": tokens, "token_strs": texts})

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request = await completions.read(DetokenizeRequest, http.stream())
        return JSONResponse({"prompt": await completions.text_of(request.tokens)})
