"""The choices of OpenAI's responses: completions and chats, in chunks or whole. No HTTP."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from disagg.model.tokenizer import Tokenizer
from disagg.server.output_text import Logprobs, Score, TextDelta

MAX_PIECE = 64 << 10  # bytes of a response that are written at once


class CompletionChoices:
    """The choices of a response to POST /v1/completions, by index."""

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._text_offsets: Counter[int] = Counter()  # by choice

    def openings(self, num_choices: int) -> list[dict[str, Any]]:
        """The choices of chunks before all text: none for completions."""
        return []

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The next part of a choice."""
        return {
            "index": index,
            "text": delta.text,
            "finish_reason": delta.finish_reason,
            "logprobs": self.logprobs(index, delta.scores),
        }

    def whole(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """A complete choice, except its log-probabilities."""
        return {"index": index, "text": text, "finish_reason": finish_reason}

    def logprobs(self, index: int, scores: Sequence[Score]) -> dict[str, list] | None:
        """The log-probabilities of the next tokens of a choice: lists with an element per token."""
        if not scores:
            return None
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for token, logprobs in scores:
            if logprobs is None:
                token_logprobs.append(None)
                top_logprobs.append(None)
            else:
                token_logprobs.append(logprobs[0])
                top_logprobs.append(self._top_logprobs(token, logprobs))
        return {
            "tokens": [self._tokenizer.spell(token) for token, _ in scores],
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": [self._text_offset(index, token) for token, _ in scores],
        }

    def _text_offset(self, index: int, token: int) -> int:
        """Where the next token of a choice begins; inside a character: where that one begins."""
        starts = [byte & 0xC0 != 0x80 for byte in self._tokenizer.bytes_of(token)]
        offset = self._text_offsets[index]
        self._text_offsets[index] += starts.count(True)
        begins_inside = starts[:1] == [False]
        return max(0, offset - 1) if begins_inside else offset

    def _top_logprobs(self, token: int, logprobs: Logprobs) -> dict[str, float]:
        """By text, including the token itself; tokens with one text share the highest value."""
        logprob, likeliest = logprobs
        by_text: dict[str, float] = {}
        for candidate, value in (*likeliest, (token, logprob)):
            by_text.setdefault(self._tokenizer.spell(candidate), value)
        return by_text


class ChatChoices:
    """The choices of a response to POST /v1/chat/completions, by index."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def openings(self, num_choices: int) -> list[dict[str, Any]]:
        """The role, in one chunk for each choice and in order.

        The `openai` clients keep a list of choices that grows at its end, and count the
        log-probabilities of a first chunk twice.
        """
        return [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            for index in range(num_choices)
        ]

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The next part of a choice."""
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self.logprobs(index, delta.scores),
            "finish_reason": delta.finish_reason,
        }

    def whole(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """A complete choice, except its log-probabilities."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "finish_reason": finish_reason,
        }

    def logprobs(self, index: int, scores: Sequence[Score]) -> dict[str, Any] | None:
        """The log-probabilities of the next tokens of a choice."""
        if not scores:
            return None
        content = []
        for token, logprobs in scores:
            assert (
                logprobs is not None
            )  # only `echo`, which chats do not have, scores a prompt
            logprob, likeliest = logprobs
            top_logprobs = [self._token(*candidate) for candidate in likeliest]
            content.append(
                {**self._token(token, logprob), "top_logprobs": top_logprobs}
            )
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.spell(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.bytes_of(token)),
        }


Choices = CompletionChoices | ChatChoices


class WholeChoice:
    """A choice of a response that is not streamed, gathered from its deltas.

    Text and log-probabilities are kept as bytes: objects would take seven times the memory.
    """

    def __init__(self, index: int, choices: Choices):
        self._index = index
        self._choices = choices
        self._text = bytearray()
        self._lists: dict[str, bytearray] = {}  # of log-probabilities, without brackets
        self._constants: dict[str, Any] = {}

    def add(self, delta: TextDelta) -> None:
        """The next part of the choice."""
        self._text += delta.text.encode(errors="surrogatepass")
        logprobs = self._choices.logprobs(self._index, delta.scores) or {}
        for name, values in logprobs.items():
            if not isinstance(values, list):
                self._constants[name] = values
                continue
            column = self._lists.setdefault(name, bytearray())
            if column:
                column += b", "
            column += json.dumps(values)[1:-1].encode()

    def pieces(self, finish_reason: str, more: Mapping[str, Any]) -> Iterator[bytes]:
        """The JSON of the choice. more: further fields of it."""
        text = self._text.decode(errors="surrogatepass")
        fields = self._choices.whole(self._index, text, finish_reason)
        yield json.dumps({**fields, **more})[:-1].encode()
        yield b', "logprobs": '
        if self._lists:
            yield from self._logprobs_pieces()
        else:
            yield b"null"
        yield b"}"

    def _logprobs_pieces(self) -> Iterator[bytes]:
        constants = [
            f"{json.dumps(name)}: {json.dumps(value)}, ".encode()
            for name, value in self._constants.items()
        ]
        yield b"{" + b"".join(constants)
        for number, (name, column) in enumerate(self._lists.items()):
            comma = ", " if number else ""
            yield f"{comma}{json.dumps(name)}: [".encode()
            for begin in range(0, len(column), MAX_PIECE):
                yield bytes(column[begin : begin + MAX_PIECE])
            yield b"]"
        yield b"}"
