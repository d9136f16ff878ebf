"""Which JSON types a parameter may have, and the JSON of its bare text."""

import json
from collections.abc import Mapping
from typing import Any

MAX_REFERENCES = 8  # that lead to each other
WORDS = {"True": "true", "False": "false", "None": "null"}  # as Python writes them


def parameter_types(schema: Mapping[str, Any], name: str) -> set[str]:
    """The types of a parameter; "string" if the schema of the parameters says nothing of it."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {"string"}
    types = _types(properties.get(name), schema, MAX_REFERENCES)
    return types or {"string"}


def _types(schema: Any, root: Mapping[str, Any], references: int) -> set[str]:
    if not isinstance(schema, Mapping) or not references:
        return set()
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else {*named}
    options = [
        option
        for keyword in ("anyOf", "oneOf", "allOf")
        for option in schema.get(keyword) or ()
    ]
    if "$ref" in schema:
        options.append(_target(schema["$ref"], root))
    for option in options:
        types |= _types(option, root, references - 1)
    return types or _types_of_values(schema)


def _types_of_values(schema: Mapping[str, Any]) -> set[str]:
    """The types of a schema that names none, by what else it says; empty if that is nothing."""
    if "properties" in schema:
        return {"object"}
    values = schema.get("enum") or [schema[key] for key in ("const",) if key in schema]
    if not values:
        return set()
    is_text = all(isinstance(each, str) for each in values)
    return {"string"} if is_text else {"number"}


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference such as "#/$defs/Place" leads to; None if it leads nowhere."""
    target: Any = root
    for key in str(reference).removeprefix("#/").split("/"):
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
