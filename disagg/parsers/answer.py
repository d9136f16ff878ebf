"""From the text of an answer to its parts, piece by piece."""

from collections.abc import Mapping
from typing import Any

from disagg.parsers.formats import AnswerFormats
from disagg.parsers.parts import Part


class AnswerParser:
    """Reads one answer: pieces of its text in, parts out.

        formats = AnswerFormats.choose(template.source)              # once for a model
        parser = AnswerParser(formats, tools, prompt, tokenizer.special_tokens)
        stream = TextStream(decoder, ..., marks=parser.marks)
        for token in tokens:
            parts = parser.add(stream.add(token))
        parts = parser.add(stream.finish()) + parser.finish()

    However the text is cut, the parts say the same, once pieces of one text are joined. Text that
    may begin a mark is held back until that is clear.

    A mark that is a special token of the tokenizer is read as this token alone, not as the same
    letters in other tokens. `TextStream` shows such a token as one character that no text has.

    formats: with neither, all text is content
    tools:   the JSON schemas of the functions' parameters by name: types of bare values. None: the
             answer has no calls. Other names are called too: clients report them to the model
    prompt:  its end tells whether the answer begins in a thought
    """

    def __init__(
        self,
        formats: AnswerFormats,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        prompt: str = "",
        special_tokens: Mapping[str, int] | None = None,
    ):
        raise NotImplementedError

    @property
    def marks(self) -> Mapping[int, str]:
        """How the special tokens that the parser reads are shown to it, by id."""
        raise NotImplementedError

    @property
    def num_thought_tokens(self) -> int:
        """Tokens of thoughts so far, without those of their marks."""
        raise NotImplementedError

    def add(self, text: str) -> tuple[Part, ...]:
        """The parts that the text of one more token makes certain; it may be empty."""
        raise NotImplementedError

    def finish(self) -> tuple[Part, ...]:
        """The rest: what was held back is content. A call that is not complete has no end."""
        raise NotImplementedError
