"""The application on a port, over a router that says what a test wants, answer by answer."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvicorn

from disagg.config import ServerConfig
from disagg.router.actions import TokenOutput
from disagg.server.app import create_app
from disagg.server.completions import read_formats
from tests.cli.conftest import free_port
from tests.server import conftest
from tests.server.conftest import FakeRouter, completions_of


class ScriptedRouter(FakeRouter):
    """Says one text after the other; the last one again and again."""

    def __init__(self, texts: Sequence[list[int]]):
        super().__init__()
        self._texts = texts

    async def generate(
        self,
        prompt: tuple[int, ...],
        params: Mapping[str, Any],
        codec: str,
        at: Any = None,
        client: str = "",
        prediction: Sequence[int] = (),
    ) -> AsyncGenerator[TokenOutput]:
        number = min(len(self.asked), len(self._texts) - 1)
        self.asked.append((prompt, dict(params), codec))
        for token in self._texts[number]:
            await asyncio.sleep(0)
            yield TokenOutput("r", token, kv=self.kv, waited_s=0.0)
        yield TokenOutput("r", finish_reason="stop", kv=self.kv)


@contextmanager
def scripted(
    template: Path, texts: Sequence[str]
) -> Iterator[tuple[str, ScriptedRouter]]:
    """The URL of a service with a chat template, and its router. A token is a byte."""
    encode = conftest.byte_tokenizer().encode
    router = ScriptedRouter([encode(text).ids for text in texts])
    with patch.object(conftest, "LINES", template.read_text()):
        completions = completions_of(router, context_length=1_000_000)
    chat = completions.reader._chat
    completions.reader.formats = read_formats(
        chat, ServerConfig(), completions.tokenizer
    )
    port = free_port()
    config = uvicorn.Config(create_app(completions), port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", router
    finally:
        server.should_exit = True
        thread.join()
