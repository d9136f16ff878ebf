"""Routes for the owner of a service: stop, scale, drain. Knows no Ray; a `WorkerPool` does.

POST /stop {"now": true} · /scale {"prefill": 2, "decode": 3} · /workers/NAME/drain
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, ValidationError

from disagg.errors import AuthError
from disagg.server.auth import has_key
from disagg.server.schema import refusal

Body = TypeVar("Body", bound=BaseModel)


class WorkerPool(Protocol):
    """The owner of the workers. Calls may block; ConfigError for an impossible change."""

    @property
    def target_counts(self) -> Mapping[str, int]:
        """The target number of workers of each role."""

    @property
    def lacks_room(self) -> Mapping[str, str]:
        """What room workers wait for, in words, by name."""

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """Scale each role to this count, in the background; None keeps the current one."""

    def drain(self, name: str) -> None:
        """Replace a worker; it leaves when its replacement serves."""


class ScaleRequest(BaseModel):
    """The target number of workers of each role; None keeps the current one."""

    model_config = ConfigDict(extra="forbid")

    prefill: int | None = None
    decode: int | None = None


class StopRequest(BaseModel):
    """now: running requests get no time to end."""

    model_config = ConfigDict(extra="forbid")

    now: bool = False


def parsed(body_type: type[Body], body: bytes) -> Body:
    """A body as its type; RequestError if it is none."""
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from error


def admin_routes(
    token: str, on_stop: Callable[[bool], None], worker_pool: WorkerPool | None
) -> APIRouter:
    """POST routes that require the owner's token.

    on_stop: called with whether running requests get no time to end
    """

    def check_owner(http: Request) -> None:
        authorization = http.headers.get("authorization", "").encode()
        if not has_key(authorization, [token]):
            raise AuthError("the token of the service is missing or wrong")

    routes = APIRouter(dependencies=[Depends(check_owner)])

    @routes.post("/stop")
    async def stop(http: Request) -> dict[str, bool]:
        request = parsed(StopRequest, await http.body() or b"{}")
        on_stop(request.now)
        return {"stopping": True}

    if worker_pool is None:
        return routes

    @routes.post("/scale")
    async def scale(http: Request) -> ScaleRequest:
        target = parsed(ScaleRequest, await http.body())
        await asyncio.to_thread(worker_pool.scale, target.prefill, target.decode)
        return target

    @routes.post("/workers/{name:path}/drain")
    async def drain(name: str) -> dict[str, str]:
        await asyncio.to_thread(worker_pool.drain, name)
        return {"leaves": name}

    return routes
