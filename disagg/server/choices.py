"""The choices of OpenAI's responses: completions and chats, in chunks or whole. No HTTP."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from disagg.model.tokenizer import Tokenizer
from disagg.parsers.parts import CallArguments, CallBegin, Content, Part, Thought
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

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any] | None:
        """The next slice of a choice; None if it shows nothing."""
        if not (delta.text or delta.scores or delta.finish_reason):
            return None
        return {
            "index": index,
            "text": delta.text,
            "finish_reason": delta.finish_reason,
            "logprobs": self.logprobs(index, delta.scores),
        }

    def whole(
        self, index: int, answer: "WholeAnswer", finish_reason: str
    ) -> dict[str, Any]:
        """A complete choice, except its log-probabilities."""
        return {"index": index, "text": answer.content, "finish_reason": finish_reason}

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


@dataclass(frozen=True)
class WholeCall:
    """A tool call of a whole answer. arguments: JSON text, cut off if the answer is."""

    name: str
    arguments: str


@dataclass(frozen=True)
class WholeAnswer:
    """What a whole answer has."""

    content: str
    thought: str = ""
    calls: Sequence[WholeCall] = ()


class ChatChoices:
    """The choices of a response to POST /v1/chat/completions, by index.

    Thoughts have two names: `reasoning_content`, which most clients read, and vLLM's `reasoning`.
    An answer with calls ends with "tool_calls"; where the client named the function, it ends with
    "stop", as OpenAI's do.

    new_call_id: names a call
    """

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        new_call_id: Callable[[], str],
        names_call: bool = False,
        shows_thoughts: bool = True,
    ):
        self._tokenizer = tokenizer
        self._new_call_id = new_call_id
        self._names_call = names_call
        self._shows_thoughts = shows_thoughts
        self._with_calls: set[int] = set()  # choices

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

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any] | None:
        """The next slice of a choice; None if it shows nothing."""
        fields = {"content": delta.text} if delta.text else {}
        for part in delta.parts:
            fields = self._fields_of(index, part)
        if not (fields or delta.scores or delta.finish_reason):
            return None
        return {
            "index": index,
            "delta": fields,
            "logprobs": self.logprobs(index, delta.scores),
            "finish_reason": self._finish_reason(index, delta.finish_reason),
        }

    def _fields_of(self, index: int, part: Part) -> dict[str, Any]:
        match part:
            case Content(text):
                return {"content": text}
            case Thought(text):
                return self._thought(text)
            case CallBegin(call, name):
                self._with_calls.add(index)
                return {"tool_calls": [{"index": call, **self._call(name, "")}]}
            case CallArguments(call, text):
                function = {"arguments": text}
                return {"tool_calls": [{"index": call, "function": function}]}
        return {}

    def whole(
        self, index: int, answer: WholeAnswer, finish_reason: str
    ) -> dict[str, Any]:
        """A complete choice, except its log-probabilities."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content,
            "refusal": None,
            **self._thought(answer.thought),
        }
        if answer.calls:
            self._with_calls.add(index)
            message["content"] = answer.content or None
            message["tool_calls"] = [
                self._call(call.name, call.arguments) for call in answer.calls
            ]
        return {
            "index": index,
            "message": message,
            "finish_reason": self._finish_reason(index, finish_reason),
        }

    def _thought(self, text: str) -> dict[str, str]:
        if not text or not self._shows_thoughts:
            return {}
        return {"reasoning_content": text, "reasoning": text}

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        return {
            "id": self._new_call_id(),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        has_calls = index in self._with_calls and not self._names_call
        return "tool_calls" if has_calls and reason == "stop" else reason

    def logprobs(self, index: int, scores: Sequence[Score]) -> dict[str, Any] | None:
        """The log-probabilities of the next tokens of a choice."""
        if not scores:
            return None
        return {"content": chat_scores(self._tokenizer, scores), "refusal": None}


def chat_scores(tokenizer: Tokenizer, scores: Sequence[Score]) -> list[dict[str, Any]]:
    """The log-probabilities of tokens of an answer, as chats and responses have them."""

    def spelled(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.spell(token),
            "logprob": logprob,
            "bytes": list(tokenizer.bytes_of(token)),
        }

    content = []
    for token, logprobs in scores:
        # only `echo`, which chats do not have, scores a prompt
        assert logprobs is not None
        logprob, likeliest = logprobs
        top_logprobs = [spelled(*candidate) for candidate in likeliest]
        content.append({**spelled(token, logprob), "top_logprobs": top_logprobs})
    return content


Choices = CompletionChoices | ChatChoices


class WholeChoice:
    """A choice of a response that is not streamed, gathered from its deltas.

    Text and log-probabilities are kept as bytes: objects would take seven times the memory.
    """

    def __init__(self, index: int, choices: Choices):
        self._index = index
        self._choices = choices
        self._content = bytearray()
        self._thought = bytearray()
        self._calls: list[tuple[str, bytearray]] = []  # names and arguments
        self._lists: dict[str, bytearray] = {}  # of log-probabilities, without brackets
        self._constants: dict[str, Any] = {}

    def add(self, delta: TextDelta) -> None:
        """The next slice of the choice."""
        self._content += _bytes_of(delta.text)
        for part in delta.parts:
            self._add_part(part)
        logprobs = self._choices.logprobs(self._index, delta.scores) or {}
        for name, values in logprobs.items():
            if not isinstance(values, list):
                self._constants[name] = values
                continue
            column = self._lists.setdefault(name, bytearray())
            if column:
                column += b", "
            column += json.dumps(values)[1:-1].encode()

    def _add_part(self, part: Part) -> None:
        match part:
            case Content(text):
                self._content += _bytes_of(text)
            case Thought(text):
                self._thought += _bytes_of(text)
            case CallBegin(_, name):
                self._calls.append((name, bytearray()))
            case CallArguments(index, text):
                _, arguments = self._calls[index]
                arguments += _bytes_of(text)

    def pieces(self, finish_reason: str, more: Mapping[str, Any]) -> Iterator[bytes]:
        """The JSON of the choice. more: further fields of it."""
        calls = [
            WholeCall(name, _text_of(arguments)) for name, arguments in self._calls
        ]
        answer = WholeAnswer(_text_of(self._content), _text_of(self._thought), calls)
        fields = self._choices.whole(self._index, answer, finish_reason)
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


def _bytes_of(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _text_of(content: bytearray) -> str:
    return content.decode(errors="surrogatepass")
