"""What clients hear: the choices of a completion or of a chat, whole or in chunks. Plain values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from disagg.model.tokenizer import Tokenizer
from disagg.server.output_text import Score, TextDelta


class CompletionAnswer:
    """The choices of one answer to POST /v1/completions, by index."""

    prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._offsets: Counter[int] = Counter()  # by choice

    def openings(self, count: int) -> list[dict[str, Any]]:
        """What comes before any piece, of so many choices."""
        return []

    def chunk(self, index: int, piece: TextDelta) -> dict[str, Any]:
        """Some more of a choice."""
        choice = {
            "index": index,
            "text": piece.text,
            "finish_reason": piece.finish_reason,
        }
        return choice | {
            "logprobs": self._logprobs(index, piece.scores) if piece.scores else None
        }

    def whole(self, index: int, piece: TextDelta) -> dict[str, Any]:
        """All of a choice."""
        return self.chunk(index, piece)

    def _logprobs(self, index: int, scores: Sequence[Score]) -> dict[str, list]:
        """Lists side by side, one element for each token. Where a token begins within a character,
        its place is that of the character."""
        offsets = []
        for token, _ in scores:
            begins = [byte & 0xC0 != 0x80 for byte in self._tokenizer.bytes_of(token)]
            offsets.append(max(0, self._offsets[index] - (begins[:1] == [False])))
            self._offsets[index] += sum(begins)
        return {
            "tokens": [self._tokenizer.spell(token) for token, _ in scores],
            "token_logprobs": [said and said[0] for _, said in scores],
            "top_logprobs": [
                said and self._top(token, *said) for token, said in scores
            ],
            "text_offset": offsets,
        }

    def _top(
        self, token: int, own: float, likeliest: Sequence[tuple[int, float]]
    ) -> dict[str, float]:
        """By text, the token itself among them; of tokens with the same text, the likeliest."""
        found: dict[str, float] = {}
        for each, logprob in (*likeliest, (token, own)):
            found.setdefault(self._tokenizer.spell(each), logprob)
        return found


class ChatAnswer:
    """The choices of one answer to POST /v1/chat/completions, by index."""

    prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def openings(self, count: int) -> list[dict[str, Any]]:
        """Who speaks, in each choice. Of its own and in order: the `openai` clients keep a list of
        choices that grows at its end, and count the log-probabilities of a first chunk twice.
        """
        said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return [
            {"index": index, **said, "finish_reason": None} for index in range(count)
        ]

    def chunk(self, index: int, piece: TextDelta) -> dict[str, Any]:
        """Some more of a choice."""
        delta = {"content": piece.text} if piece.text else {}
        return {"index": index, "delta": delta, **self._ending(piece)}

    def whole(self, index: int, piece: TextDelta) -> dict[str, Any]:
        """All of a choice."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, **self._ending(piece)}

    def _ending(self, piece: TextDelta) -> dict[str, Any]:
        content = [self._score(*score) for score in piece.scores]
        logprobs = {"content": content, "refusal": None} if content else None
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _score(self, token: int, said: Any) -> dict[str, Any]:
        own, likeliest = said
        return self._one(token, own) | {
            "top_logprobs": [self._one(*each) for each in likeliest]
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._tokenizer.spell(token), self._tokenizer.bytes_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


def error_body(
    message: str, reason: str, status: int, param: str | None = None
) -> Mapping:
    """The body of an error, as the `openai` client reads it."""
    return {
        "error": {"message": message, "type": reason, "param": param, "code": status}
    }
