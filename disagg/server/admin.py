"""What the owner of a service may change while it serves. Knows no Ray: `WorkerPool` does it.

POST /stop · /scale {"prefill": 2, "decode": 3} · /workers/NAME/drain
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, ValidationError

from disagg.errors import AuthError
from disagg.server.access import bears
from disagg.server.schema import refusal


class WorkerPool(Protocol):
    """Whoever has the workers. Calls may block; ConfigError for what cannot be."""

    @property
    def wanted(self) -> Mapping[str, int]:
        """How many workers of each role there shall be."""

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """So many of each role, soon; None: as many as now."""

    def drain(self, name: str) -> None:
        """One leaves when another one has taken its place."""


class Wanted(BaseModel):
    """How many workers are wanted."""

    model_config = ConfigDict(extra="forbid")

    prefill: int | None = None
    decode: int | None = None


def admin_routes(
    token: str, on_stop: Callable[[], None], staff: WorkerPool | None
) -> APIRouter:
    """The routes, for whoever carries the token."""

    def is_owner(http: Request) -> None:
        if not bears(http.headers.get("authorization", "").encode(), [token]):
            raise AuthError("the token of the service is missing or wrong")

    routes = APIRouter(dependencies=[Depends(is_owner)])

    @routes.post("/stop")
    async def stop() -> dict[str, bool]:
        on_stop()
        return {"stopping": True}

    if staff is None:
        return routes

    @routes.post("/scale")
    async def scale(http: Request) -> Wanted:
        try:
            wanted = Wanted.model_validate_json(await http.body())
        except ValidationError as error:
            raise refusal(error) from error
        await asyncio.to_thread(staff.scale, wanted.prefill, wanted.decode)
        return wanted

    @routes.post("/workers/{name:path}/drain")
    async def drain(name: str) -> dict[str, str]:
        await asyncio.to_thread(staff.drain, name)
        return {"leaves": name}

    return routes
