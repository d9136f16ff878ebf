"""In place of the processes of a benchmark: threads of this one, which has imported everything."""

import asyncio
import gc
import os
import threading
from typing import Any, Self


class Here:
    """What `Child` is to a benchmark."""

    def __init__(self, role: type, isolated: bool = False):
        assert not isolated
        self.pid = os.getpid()
        self._there = role()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def ask(self, method: str, *arguments: Any) -> Any:
        call = getattr(self._there, method)(*arguments)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if worker := getattr(self._there, "_worker", None):
            worker.stop(0.0)
            worker.wait()
        asyncio.run_coroutine_threadsafe(end_others(), self._loop).result()
        del self._there
        gc.collect()  # servers of gRPC shut down when they go, in this loop
        asyncio.run_coroutine_threadsafe(wait_for_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def end_others() -> None:
    """Cancel all that goes on in this loop."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await wait_for_others()


async def wait_for_others() -> None:
    """Return when nothing else goes on in this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
