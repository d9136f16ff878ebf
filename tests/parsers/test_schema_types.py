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
        ({"enum": ["C"], "anyOf": [{"type": "string"}]}, ["C"]),
        ({"allOf": [{"$ref": "#/$defs/Unit"}, {"title": "Unit"}]}, ["C", "F"]),
        ({"allOf": [UNIT, {"enum": ["F", "K"]}]}, ["F"]),
    ],
)
def test_listed_values_are_found_through_references(schema, values):
    assert sorted(parameter_values(root(schema), "unit"), key=str) == sorted(
        values, key=str
    )


@pytest.mark.parametrize(
    ("reference", "kind"),
    [
        ("#/$defs/per~1day", "integer"),
        ("#/$defs/a~0b", "boolean"),
        ("#/$defs/my%20unit", "number"),
        ("#", "object"),
        ("#/$defs/none", "string"),
    ],
)
def test_references_are_json_pointers(reference, kind):
    schema = {
        "properties": {"unit": {"$ref": reference}},
        "$defs": {
            "per/day": {"type": "integer"},
            "a~b": {"type": "boolean"},
            "my unit": {"type": "number"},
        },
    }

    assert parameter_types(schema, "unit") == {kind}


def test_a_long_chain_of_references_ends():
    names = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)}
    schema = {"properties": {"unit": {"$ref": "#/$defs/0"}}, "$defs": names}

    assert parameter_values(schema, "unit") == []
    assert parameter_types(schema, "unit") == {"string"}


def test_many_options_are_all_listed():
    options = [{"const": f"{i}"} for i in range(1000)]

    assert len(parameter_values(root({"oneOf": options}), "unit")) == 1000


def test_options_that_repeat_each_other_are_listed_once():
    names = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(20)}
    schema = {
        "properties": {"unit": {"$ref": "#/$defs/0"}},
        "$defs": {**names, "20": UNIT},
    }

    assert parameter_values(schema, "unit") == ["C", "F"]
