"""Which JSON types a parameter may have, and the JSON of its bare text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 50  # schemas that lead to each other, in which listed values are looked for
WORDS = {"True": "true", "False": "false", "None": "null"}  # as Python writes them
Values = dict[str, Any]  # by their JSON


def parameter_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """The types of a parameter; "string" if the schema of the parameters says nothing of it."""
    alternatives = _alternatives(schema, name)
    types = {name for each in alternatives for name in _types(each)}
    return types or {"string"}


def parameter_values(schema: Mapping[str, Any], name: str) -> list[Any]:
    """The only values that a parameter may have; empty if the schema does not list them."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return []
    values = _listed_values(properties.get(name), schema, {}, 0) or {}
    return [*values.values()]


def _listed_values(
    schema: Any,
    root: Mapping[str, Any],
    known: dict[int, Values | None],
    depth: int,
) -> Values | None:
    """The only values that a schema and all that it leads to allow; None if nothing lists them.

    known: of the schemas that were seen, by id; None while a schema is looked into, so one that
           leads back to itself lists nothing there
    """
    if not isinstance(schema, Mapping):
        return None
    if id(schema) not in known and depth < MAX_DEPTH:
        known[id(schema)] = None
        lists = [x for x in _value_lists(schema, root, known, depth) if x is not None]
        if lists:
            first, *others = lists
            known[id(schema)] = {
                text: value
                for text, value in first.items()
                if all(text in other for other in others)
            }
    return known.get(id(schema))


def _value_lists(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    known: dict[int, Values | None],
    depth: int,
) -> Iterator[Values | None]:
    """What each keyword of a schema allows; None: anything."""

    def of(target: Any) -> Values | None:
        return _listed_values(target, root, known, depth + 1)

    listed = _values(schema)
    if schema.get("type") == "null":
        listed = [None]
    yield {json.dumps(value): value for value in listed} or None
    if "$ref" in schema:
        yield of(_target(schema["$ref"], root))
    for part in _items(schema.get("allOf")):
        yield of(part)
    for keyword in ("anyOf", "oneOf"):
        yield _united([of(option) for option in _items(schema.get(keyword))])


def _united(options: Sequence[Values | None]) -> Values | None:
    """The values of all options; None if there are no options, or one lists none."""
    values: Values = {}
    for option in options:
        if option is None:
            return None
        values.update(option)
    return values or None


def _alternatives(root: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The schema of a parameter, and all that its options and references lead to, each once."""
    properties = root.get("properties")
    ahead = [properties.get(name)] if isinstance(properties, Mapping) else []
    reached: dict[int, Mapping[str, Any]] = {}
    while ahead:
        schema = ahead.pop()
        if isinstance(schema, Mapping) and id(schema) not in reached:
            reached[id(schema)] = schema
            ahead += _options(schema, root)
    return [*reached.values()]


def _options(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any]:
    options = [
        option
        for keyword in ("anyOf", "oneOf", "allOf")
        for option in _items(schema.get(keyword))
    ]
    if "$ref" in schema:
        options.append(_target(schema["$ref"], root))
    return options


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types of a schema, by what else it says if it names none; empty if that is nothing."""
    named = schema.get("type")
    types = {each for each in (named, *_items(named)) if isinstance(each, str)}
    if types:
        return types
    if "properties" in schema:
        return {"object"}
    values = _values(schema)
    if not values:
        return set()
    is_text = all(isinstance(each, str) for each in values)
    return {"string"} if is_text else {"number"}


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """The only values that a schema allows; empty if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    return _items(schema.get("enum"))


def _items(value: Any) -> list[Any]:
    """The items of a list; none of anything else, since clients' schemas are not checked."""
    return value if isinstance(value, list) else []


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference such as "#/$defs/Place" leads to; None if it leads nowhere.

    It is a JSON pointer: "~1" stands for "/", "~0" for "~", and "#" alone for the root.
    """
    target: Any = root
    for part in unquote(str(reference)).removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


def is_string(types: set[str]) -> bool:
    """Whether a bare text is a string whatever it says."""
    return types == {"string"}


def json_text(text: str, types: set[str]) -> str:
    """The JSON of a bare text of one of some types; a string if it is of none of them.

    types: empty: of any type
    """
    bare = text.strip()
    bare = WORDS.get(bare, bare)
    is_null = bare == "null" and "null" in types
    if is_null or ("string" not in types and _is_json(bare)):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
