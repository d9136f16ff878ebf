"""One answer while it is generated: from the deltas of its text to deltas of its parts. No HTTP."""

from collections.abc import Sequence
from dataclasses import replace

from disagg.parsers.answer import AnswerParser
from disagg.parsers.parts import CallBegin, CallEnd, Content, Part
from disagg.server.output_text import TextDelta


class AnswerParts:
    """Reads the parts of one answer.

    parallel:   false: the answer ends behind its first call
    only_calls: a grammar allows nothing but calls behind a thought; so what else there is, is the
                beginning of a call that was cut off before its name, which no client can use
    """

    def __init__(
        self, parser: AnswerParser, parallel: bool = True, only_calls: bool = False
    ):
        self._parser = parser
        self._parallel = parallel
        self._only_calls = only_calls
        self._is_calling = False
        self._is_over = False  # behind the only call

    def read(self, delta: TextDelta) -> TextDelta:
        """A delta with parts in place of its text; an answer cut in a call says "length"."""
        parts: list[Part] = []
        if delta.text or delta.finish_reason is None:  # else there is no token
            parts += self._take(self._parser.add(delta.text))
        finish_reason = "stop" if self._is_over else delta.finish_reason
        if finish_reason is not None:
            parts += self._take(self._parser.finish())
            finish_reason = "length" if self._is_calling else finish_reason
        if self._only_calls:
            parts = [part for part in parts if not isinstance(part, Content)]
        return replace(
            delta,
            text="",
            parts=tuple(parts),
            num_thought=self._parser.num_thought_tokens,
            finish_reason=finish_reason,
        )

    def _take(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Parts up to the end of the answer."""
        for number, part in enumerate(parts, 1):
            if self._is_over:
                return []
            if isinstance(part, CallBegin):
                self._is_calling = True
            if isinstance(part, CallEnd):
                self._is_calling = False
                self._is_over = not self._parallel
                if self._is_over:
                    return parts[:number]
        return parts
