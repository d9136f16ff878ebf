"""Texts, in which special tokens may stand, as a Lark grammar writes them.

"so</think>"   "so" <[151668]>
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LarkPiece:
    """A text or a special token, as a Lark grammar writes it."""

    lark: str
    is_special: bool


def lark_text(text: str) -> str:
    """A text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def split_mark(text: str, special_tokens: Mapping[str, int]) -> list[LarkPiece]:
    """A text cut at its special tokens, in order; none of the parts is empty."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    names = "|".join(map(re.escape, longest_first))
    pieces = re.split(f"({names})", text) if names else [text]
    return [_lark_piece(piece, special_tokens) for piece in pieces if piece]


def lark_of(text: str, special_tokens: Mapping[str, int]) -> str:
    """A text with special tokens as a Lark grammar writes it; empty if the text is."""
    return " ".join(piece.lark for piece in split_mark(text, special_tokens))


def _lark_piece(piece: str, special_tokens: Mapping[str, int]) -> LarkPiece:
    if piece in special_tokens:
        return LarkPiece(f"<[{special_tokens[piece]}]>", is_special=True)
    return LarkPiece(lark_text(piece), is_special=False)
