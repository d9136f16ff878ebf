"""Follow constraints in a vocabulary of bytes, with special tokens behind them."""

import re
from collections.abc import Mapping

from disagg.errors import RequestError
from disagg.grammar.state import GrammarState
from disagg.grammar.vocabulary import Vocabulary

BYTES = [bytes([number]) for number in range(256)]


def vocabulary(special: Mapping[str, int] | None = None) -> Vocabulary:
    """The bytes, and special tokens with ids from 256 on."""
    special = special or {}
    names = [name.encode() for name in special]
    return Vocabulary([*BYTES, *names], special, lambda text: text.encode())


def tokens_of(text: str, special: Mapping[str, int] | None = None) -> list[int]:
    """A text as bytes and special tokens."""
    if not special:
        return [*text.encode()]
    pieces = re.split(f"({'|'.join(map(re.escape, special))})", text)
    tokens: list[int] = []
    for piece in pieces:
        tokens += [special[piece]] if piece in special else piece.encode()
    return tokens


def may_end(state: GrammarState, words: Vocabulary) -> bool:
    """Whether the text of a grammar may end here."""
    return bool(state.bits()[words.end // 32] >> words.end % 32 & 1)


def is_whole(
    constraint: str, text: str, special: Mapping[str, int] | None = None
) -> bool:
    """Whether a constraint allows a text, and that the answer ends with it."""
    words = vocabulary(special)
    state = GrammarState.compile(constraint, words)
    try:
        state.follow(tokens_of(text, special))
    except RequestError:
        return False
    return may_end(state, words)
