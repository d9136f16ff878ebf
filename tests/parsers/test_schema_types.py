"""The types and values of parameters, whatever schema a client sends."""

import pytest

from disagg.parsers.schema_types import parameter_types, parameter_values

UNIT = {"type": "string", "enum": ["C", "F"]}


def root(schema):
    return {"properties": {"unit": schema}, "$defs": {"Unit": UNIT}}


@pytest.mark.parametrize(
    "schema",
    [{"type": None}, {"type": 3}, {"type": [["x"]]}, {"anyOf": 3}, {"enum": 3}, True],
)
def test_a_broken_schema_says_nothing(schema):
    assert parameter_types(root(schema), "unit") == {"string"}
    assert parameter_values(root(schema), "unit") == []


def test_options_that_lead_back_are_followed_once():
    node = {"anyOf": [{"$ref": "#/$defs/Node"}] * 1000 + [{"type": "integer"}]}
    schema = {
        "properties": {"node": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": node},
    }

    assert parameter_types(schema, "node") == {"integer"}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (UNIT, ["C", "F"]),
        ({"const": "C"}, ["C"]),
        ({"$ref": "#/$defs/Unit"}, ["C", "F"]),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, ["C", "F", None]),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "string"}]}, []),
    ],
)
def test_listed_values_are_found_through_references(schema, values):
    assert sorted(parameter_values(root(schema), "unit"), key=str) == sorted(
        values, key=str
    )
