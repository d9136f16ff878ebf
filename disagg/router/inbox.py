"""Passes the outputs of one request from the router to the coroutine that awaits them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from disagg.errors import DisaggError
from disagg.router.actions import TokenOutput

Deliver = Callable[[TokenOutput | DisaggError], None]
Name = TypeVar("Name")


async def outputs_of(
    begin: Callable[[Deliver], Name], leave: Callable[[Name], None]
) -> AsyncGenerator[TokenOutput]:
    """The tokens of a request, then its end; an error that is delivered is raised.

    begin: begins the request when the first output is awaited, and returns its name
    leave: called with this name when the iteration ends, whatever the reason
    """
    inbox: asyncio.Queue[TokenOutput | DisaggError] = asyncio.Queue()
    name = begin(inbox.put_nowait)
    del begin  # it may keep a copy of the prompt
    try:
        while True:
            output = await inbox.get()
            if isinstance(output, DisaggError):
                raise output
            yield output
            if output.finish_reason is not None:
                return
    finally:
        leave(name)
