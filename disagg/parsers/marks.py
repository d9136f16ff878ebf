"""Special tokens as characters of a text, where their letters alone could be ordinary tokens."""

from collections.abc import Iterable, Mapping

# lone surrogates: no tokenizer decodes to them, since they are not UTF-8
FIRST_CODE, LAST_CODE = "\ud800", "\udfff"
CODES = f"{FIRST_CODE}-{LAST_CODE}"  # in a set of a regular expression


class Marks:
    """The special tokens of a tokenizer that occur in marks, one character each."""

    def __init__(self, marks: Iterable[str], special_tokens: Mapping[str, int]):
        names = [
            name
            for name in special_tokens
            if name and any(name in mark for mark in marks)
        ]
        names.sort(key=len, reverse=True)
        self._codes = {name: chr(ord(FIRST_CODE) + i) for i, name in enumerate(names)}
        self._letters = {ord(code): name for name, code in self._codes.items()}
        self.by_token: Mapping[int, str] = {
            special_tokens[name]: code for name, code in self._codes.items()
        }

    def coded(self, mark: str) -> str:
        """A mark as it stands in a text of this tokenizer."""
        for name, code in self._codes.items():
            mark = mark.replace(name, code)
        return mark

    def spelled(self, text: str) -> str:
        """A text with the letters of its special tokens, for clients."""
        return text.translate(self._letters) if self._letters else text

    def has_token(self, mark: str) -> bool:
        """Whether a coded mark has a special token, so that letters alone never make it."""
        return any(ord(letter) in self._letters for letter in mark)
