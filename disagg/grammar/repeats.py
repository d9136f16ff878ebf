"""The cost of nested counted repeats, such as ((a{100}){100}){100}, before anything compiles them.

A repeat of a repeat has as many states as the product of the counts. llguidance builds them while
it makes a mask, for seconds, and no limit of its own covers that.
"""

import re

from disagg.errors import RequestError, quoted

MOST_STATES = 20_000
COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
# a terminal of a Lark grammar with its definition, which ends where the next one begins
TERMINAL = re.compile(
    r"^([A-Z_][A-Z0-9_]*)(?:\[[^\]\n]*\])?\s*:(.*?)(?=^\w|\Z)", re.M | re.S
)
NAME = re.compile(r"\b[A-Z_][A-Z0-9_]*\b")


def check_pattern(pattern: str) -> None:
    """RequestError for a regular expression with too many states."""
    states = num_states(pattern)
    if states > MOST_STATES:
        raise RequestError(
            f"{quoted(pattern)} repeats repeats about {states:,} times; expected counts "
            f"whose product is at most {MOST_STATES:,}"
        )


def check_terminals(grammar: str) -> None:
    """RequestError for a Lark grammar whose regular expressions have too many states.

    Terminals become one regular expression with those that they name.
    """
    check_pattern(grammar)
    definitions = {match[1]: match[2] for match in TERMINAL.finditer(grammar)}
    states: dict[str, int] = {}
    for name in definitions:
        _resolve(name, definitions, states)
        if states[name] > MOST_STATES:
            raise RequestError(
                f"the terminal {quoted(name)} repeats repeats about {states[name]:,} "
                f"times; expected counts whose product is at most {MOST_STATES:,}"
            )


def _resolve(name: str, definitions: dict[str, str], states: dict[str, int]) -> None:
    """Store the states of a terminal, those of the terminals that it names first."""
    path = [name]
    while path:
        current = path[-1]
        states.setdefault(
            current, 1
        )  # also of one that names itself, which fails later
        named = {*NAME.findall(definitions[current])} & definitions.keys()
        unresolved = named - states.keys()
        if unresolved:
            path.append(unresolved.pop())
            continue
        largest = max((states[other] for other in named - {current}), default=1)
        states[current] = largest * num_states(definitions[current])
        path.pop()


def num_states(pattern: str) -> int:
    """The largest product of counted repeats inside each other; 1 without any."""
    groups = [1]  # the largest product in each open group
    closed = 1  # that of the group or character in front
    text = CLASS.sub(".", pattern)
    place = 0
    while place < len(text):
        letter = text[place]
        repeat = COUNT.match(text, place)
        if letter == "\\":
            place, closed = place + 2, 1
        elif letter == "(":
            groups.append(1)
            place += 1
        elif letter == ")" and len(groups) > 1:
            closed = groups.pop()
            groups[-1] = max(groups[-1], closed)
            place += 1
        elif repeat:
            closed *= max(1, *(int(count or 0) for count in repeat.groups("0")))
            groups[-1] = max(groups[-1], closed)
            place = repeat.end()
        else:
            place, closed = place + 1, 1
    return max(groups)
