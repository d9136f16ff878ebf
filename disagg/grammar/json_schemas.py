"""JSON schemas as clients write them: mistakes with their place, and what llguidance gets.

The place of a mistake is its JSON pointer, such as `/properties/age/type`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from disagg.errors import MAX_QUOTED_CHARS, RequestError
from disagg.grammar.limits import error_of
from disagg.grammar.repeats import check_pattern

MAX_SUBSCHEMAS = 10_000
MAX_DEPTH = 50  # schemas inside each other; llguidance reads JSON 128 levels deep
MOST_LOCATED = 300  # subschemas that are compiled to find the one with an error
MAX_MULTIPLE = 10_000  # a `multipleOf` has as many states
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
# formats that are followed; others are comments, as the specification says
FORMATS = {
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
}
# keywords whose value is a schema, a list of schemas, or schemas by name
SCHEMA = {
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
}
SCHEMAS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
NAMED_SCHEMAS = {
    "$defs",
    "definitions",
    "dependentSchemas",
    "patternProperties",
    "properties",
}
DEFINITIONS = ("$defs", "definitions")
LIMITS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
COUNTS = {
    "maxItems",
    "maxLength",
    "maxProperties",
    "minItems",
    "minLength",
    "minProperties",
}
TEXTS = {"$ref", "format", "pattern"}

# models that write JSON for a long time would else write nothing but space
SPACES = r"( |\n( {0,24}|\t{0,8}))"
Schema = dict[str, Any] | bool
Place = tuple[str, ...]


def schema_text(schema: Any) -> str:
    """A schema as llguidance reads it; RequestError with the place of a mistake.

    May take a tenth of a second.
    """
    prepared = prepare(schema)
    text = _options(prepared)
    error = error_of(f"start: %json {text}")
    if error:
        pointer, error = _locate(prepared, error)
        raise RequestError(f"the schema at {pointer} is not supported: {error}")
    return text


def prepare(schema: Any) -> Schema:
    """A schema without comments that llguidance would refuse; RequestError for a mistake."""
    if not isinstance(schema, bool | Mapping):
        raise _mistake((), schema, "an object or a boolean")
    try:
        prepared: Schema = json.loads(json.dumps(schema))  # a copy
    except (RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"the schema is no JSON: {error}") from error
    for place, subschema in subschemas(prepared):
        _check_keywords(place, subschema)
        if subschema.get("format") not in FORMATS:
            subschema.pop("format", None)
    return prepared


def subschemas(schema: Schema) -> Iterator[tuple[Place, dict[str, Any]]]:
    """A schema and all in it, with their places; those outside first.

    RequestError for a subschema that is none, for too many and for too deep ones.
    """
    ahead: list[tuple[Place, Any]] = [((), schema)]
    count = 0
    while ahead:
        place, subschema = ahead.pop()
        count += 1
        if isinstance(subschema, bool):
            continue
        if not isinstance(subschema, dict):
            raise _mistake(place, subschema, "a schema: an object or a boolean")
        if count > MAX_SUBSCHEMAS or len(place) > 2 * MAX_DEPTH:
            raise RequestError(
                f"the schema is too large at {pointer_of(place)}; expected at most "
                f"{MAX_SUBSCHEMAS} schemas, {MAX_DEPTH} inside each other"
            )
        yield place, subschema
        ahead += _children(place, subschema)


def _children(place: Place, schema: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """The schemas that the keywords of a schema have."""
    for keyword, value in schema.items():
        inside = (*place, keyword)
        if keyword in SCHEMAS and isinstance(value, list):
            yield from (
                ((*inside, str(index)), item) for index, item in enumerate(value)
            )
        elif keyword in SCHEMA:
            yield inside, value
        elif keyword in SCHEMAS:
            raise _mistake(inside, value, "a list of schemas")
        elif keyword in NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise _mistake(inside, value, "an object of schemas by name")
            yield from (((*inside, name), item) for name, item in value.items())


def _check_keywords(place: Place, schema: Mapping[str, Any]) -> None:
    """RequestError for the value of a keyword that makes no sense, or costs too much."""
    for keyword, value in schema.items():
        expected = _expected(keyword, value)
        if expected:
            raise _mistake((*place, keyword), value, expected)
    patterns = [*schema.get("patternProperties", ())]
    if "pattern" in schema:
        patterns.append(schema["pattern"])
    for pattern in patterns:
        try:
            check_pattern(pattern)
        except RequestError as error:
            raise RequestError(f"{error}, at {pointer_of(place)}") from error


def _expected(keyword: str, value: Any) -> str:
    """What would be right; empty for a value that is, and for keywords without a rule."""
    rule = RULES.get(keyword)
    return "" if rule is None or rule.holds(value) else rule.expected


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_limit(value: Any) -> bool:
    """Whether it can be a limit of numbers: drafts before 2019 have booleans for exclusive ones."""
    return isinstance(value, int | float)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return _are_texts(names) and bool(names) and {*names} <= {*TYPES}


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_text, values))


def _are_values(values: Any) -> bool:
    return isinstance(values, list) and bool(values)


def _is_multiple(number: Any) -> bool:
    """Whether a `multipleOf` has few states: as many as its digits without trailing zeros say."""
    if not _is_number(number) or not 1e-6 <= number <= MAX_MULTIPLE:
        return False
    digits = Decimal(str(number)).normalize().as_tuple().digits
    return int("".join(map(str, digits))) <= MAX_MULTIPLE


@dataclass(frozen=True)
class Rule:
    """What the value of a keyword has to be."""

    holds: Callable[[Any], bool]
    expected: str


RULES: Mapping[str, Rule] = {
    "type": Rule(_is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "required": Rule(_are_texts, "a list of names"),
    "enum": Rule(_are_values, "a list with at least one value"),
    "multipleOf": Rule(_is_multiple, "a number from 1e-6 to 10000"),
    **dict.fromkeys(LIMITS, Rule(_is_limit, "a number")),
    **dict.fromkeys(COUNTS, Rule(_is_count, "an integer from 0")),
    **dict.fromkeys(TEXTS, Rule(_is_text, "a text")),
}


def pointer_of(place: Place) -> str:
    """A place as a JSON pointer; that of the whole schema is '#'."""
    steps = (step.replace("~", "~0").replace("/", "~1") for step in place)
    return "#" + "".join(f"/{step}" for step in steps)


def _mistake(place: Place, value: Any, expected: str) -> RequestError:
    shown = json.dumps(value, default=repr)[:MAX_QUOTED_CHARS]
    return RequestError(
        f"the schema at {pointer_of(place)} is {shown}; expected {expected}"
    )


def _options(schema: Schema) -> str:
    """The text of a schema with our options for its JSON."""
    if schema is False:
        return "false"
    options = {"whitespace_pattern": SPACES}
    fields = {} if schema is True else schema
    return json.dumps({**fields, "x-guidance": options})


def _locate(root: Schema, error: str) -> tuple[str, str]:
    """The place of the smallest schema that has an error by itself, and that error."""
    pointer = pointer_of(())
    if isinstance(root, bool):
        return pointer, error
    definitions = {name: root[name] for name in DEFINITIONS if name in root}
    for number, (place, schema) in enumerate(subschemas(root)):
        if number >= MOST_LOCATED:
            break
        own = error_of(f"start: %json {json.dumps({**definitions, **schema})}")
        if own == error and len(pointer_of(place)) >= len(pointer):
            pointer = pointer_of(place)
    return pointer, error
