"""One answer on its way to one client: its choices side by side, whole or as events. No HTTP."""

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from disagg.errors import CancelledError, DisaggError
from disagg.server.answers import ChatAnswer, CompletionAnswer, error_body
from disagg.server.completions import Completions, TokenizedPrompt, reason_of
from disagg.server.output_text import TextDelta
from disagg.server.schema import GenerationRequest

DONE = "data: [DONE]\n\n"

Answers = type[CompletionAnswer] | type[ChatAnswer]


class Reply:
    """The choices of one request; whoever stops to read them cancels them all."""

    def __init__(
        self,
        completions: Completions,
        request: GenerationRequest,
        prompts: Sequence[TokenizedPrompt],
        answer: Answers,
    ):
        self._prompts = prompts
        self._request = request
        self._answer = answer(completions.tokenizer)
        self._pieces = merged(
            [
                completions.stream(request, x, i)
                for x in prompts
                for i in range(request.n)
            ]
        )
        self._last: dict[int, TextDelta] = {}  # of each choice
        self._named = {
            "id": f"{answer.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": completions.served.name,
        }

    async def begin(self) -> tuple[int, TextDelta]:
        """The first piece, before any status is sent: what fails until then has its own."""
        return await anext(self._pieces)

    async def events(self, first: tuple[int, TextDelta]) -> AsyncIterator[str]:
        """Server-sent events, the last one "[DONE]"; an error in mid-stream is an event too."""
        options, head = (
            self._request.stream_options,
            {"object": self._answer.chunk_object},
        )
        found: tuple[int, TextDelta] | None = first

        def chunk(choice: Mapping[str, Any]) -> str:
            usage = {"usage": self._usage()} if options.continuous_usage_stats else {}
            return event(self._named | head | {"choices": [choice]} | usage)

        try:
            async with aclosing(self._pieces):
                for opening in self._answer.openings(self._request.n):
                    yield chunk(opening)
                while found is not None:
                    index, piece = found
                    self._last[index] = piece
                    if piece.text or piece.scores or piece.finish_reason:
                        yield chunk(
                            self._with_kv(self._answer.chunk(index, piece), piece)
                        )
                    found = await anext(self._pieces, None)
        except DisaggError as error:
            yield event(
                error_body(str(error), error.reason, error.http_status, error.param)
            )
        else:
            if options.include_usage:
                yield event(
                    self._named | head | {"choices": [], "usage": self._usage()}
                )
        yield DONE

    async def whole(self) -> dict[str, Any]:
        """The answer as one body."""
        pieces: dict[int, list[TextDelta]] = {}
        async with aclosing(self._pieces):
            async for index, piece in self._pieces:
                pieces.setdefault(index, []).append(piece)
        choices = []
        for index, some in sorted(pieces.items()):
            self._last[index] = some[-1]
            scores = tuple(score for piece in some for score in piece.scores)
            text = "".join(piece.text for piece in some)
            whole = replace(some[-1], text=text, scores=scores)
            choices.append(self._with_kv(self._answer.whole(index, whole), whole))
        head = {
            "object": self._answer.whole_object,
            "choices": choices,
            "usage": self._usage(),
        }
        return self._named | head

    def _with_kv(self, choice: dict[str, Any], piece: TextDelta) -> dict[str, Any]:
        """With the figures of its hand-off, where it ends and they are asked for."""
        wanted = self._request.kv and piece.finish_reason is not None
        return choice | ({"kv": dict(piece.kv)} if wanted else {})

    def _usage(self) -> dict[str, Any]:
        """Every prompt counts once, however many answers it has. Cached: not computed again."""
        prompt = sum(len(prompt.tokens) for prompt in self._prompts)
        answer = sum(piece.num_tokens for piece in self._last.values())
        firsts = [
            self._last.get(i * self._request.n) for i in range(len(self._prompts))
        ]
        cached = sum(piece.kv.get("cached_tokens", 0) for piece in firsts if piece)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def merged(
    streams: Sequence[AsyncGenerator[TextDelta]],
) -> AsyncGenerator[tuple[int, TextDelta]]:
    """The pieces of all streams as they come, with the place of each stream; what came of one while
    the last was on its way to a slow client is one piece.

    The first error ends it, and cancels all the others by its reason; leaving it closes them.
    """
    reason = CancelledError.reason
    arrived: deque[tuple[int, TextDelta] | Exception | None] = deque()
    some = asyncio.Event()

    def put(found: tuple[int, TextDelta] | Exception | None) -> None:
        last = arrived[-1] if arrived else None
        if isinstance(found, tuple) and isinstance(last, tuple) and found[0] == last[0]:
            arrived[-1] = found[0], last[1].before(found[1])
        else:
            arrived.append(found)
        some.set()

    async def read(index: int, stream: AsyncGenerator[TextDelta]) -> None:
        try:
            async with aclosing(stream):
                async for piece in stream:
                    put((index, piece))
            put(None)
        except Exception as error:
            put(error)

    tasks = [asyncio.create_task(read(*each)) for each in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            await some.wait()
            found = arrived.popleft()
            if not arrived:
                some.clear()
            if isinstance(found, Exception):
                reason = reason_of(found)
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel(reason)
        await asyncio.gather(*tasks, return_exceptions=True)


def event(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n"
