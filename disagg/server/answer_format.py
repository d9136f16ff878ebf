"""How a model's answers are read: which parser reads its calls, and which its thoughts. No HTTP."""

from dataclasses import dataclass

from disagg.server.answer_parts import AnswerParts


@dataclass(frozen=True)
class AnswerReading:
    """How the answers to one prompt are read.

    is_open:  the prompt ends in a thought
    parallel: false: an answer ends behind its first call
    """

    is_open: bool
    parallel: bool

    @property
    def has_thoughts(self) -> bool:
        """Whether thoughts are told from the rest of an answer."""
        raise NotImplementedError

    def parts(self) -> AnswerParts:
        """The reader of one answer."""
        raise NotImplementedError
