"""What a grammar may cost, and the errors of llguidance in short."""

import re

from llguidance import LLMatcher, LLParserLimits

MAX_CONSTRAINT_CHARS = 256 << 10
# "at 1(8): failed to compile JSON schema: " in front of an error
OPENING = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


def parser_limits() -> LLParserLimits:
    """About 20 ms for compiling the regular expressions of a grammar, and 10 ms for a mask."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=150_000,
        step_max_items=50_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def error_of(grammar: str) -> str:
    """Why llguidance cannot follow a grammar, apart from its special tokens; empty: it can."""
    message = LLMatcher.validate_grammar(grammar, None, limits=parser_limits())
    return "" if message.startswith("WARNING") else short_error(message)


def short_error(message: str) -> str:
    """An error of llguidance on one line, without the grammar that it repeats."""
    lines = []
    for line in message.splitlines():
        if re.match(r"^\s+\d+ \| ", line) or line.startswith("<"):
            break
        lines.append(line.strip())
    return OPENING.sub("", " ".join(lines).strip())[:400]
