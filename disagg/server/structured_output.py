"""Fields that say what form an answer has: OpenAI's, and those of vLLM. No HTTP.

{"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": {...}}}}
{"structured_outputs": {"regex": "[0-9]{3}"}}
{"guided_choice": ["yes", "no"]}
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from disagg.errors import RequestError
from disagg.grammar import constraints
from disagg.grammar.limits import MAX_CONSTRAINT_CHARS

Builder = Callable[[], str]


def schema_of(value: Any) -> Any:
    """A JSON schema, which may be sent as a text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("schema", "expected a JSON schema") from error


JsonSchema = Annotated[dict[str, Any] | bool, BeforeValidator(schema_of)]
GrammarText = Annotated[str, Field(max_length=MAX_CONSTRAINT_CHARS)]
Choices = Annotated[
    list[GrammarText], Field(min_length=1, max_length=constraints.MAX_CHOICES)
]


class JsonSchemaFormat(BaseModel):
    """A named JSON schema. It is followed whatever `strict` is."""

    name: str = ""
    # the name of a method of pydantic
    fields: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`."""

    model_config = ConfigDict(extra="forbid")

    json_: JsonSchema | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    # no other library takes the place of the grammar's
    disable_fallback: bool = False
    # those of vLLM that are not supported
    disable_any_whitespace: Literal[False] = False
    disable_additional_properties: Literal[False] = False
    whitespace_pattern: None = None
    structural_tag: None = None

    @property
    def builders(self) -> dict[str, Builder | None]:
        """What builds the constraint of each field; None: it is not set."""
        return {
            "json": _json(self.json_),
            "regex": _regex(self.regex),
            "choice": _choice(self.choice),
            "grammar": _lark(self.grammar),
            "json_object": constraints.json_object if self.json_object else None,
        }


class StructuredFields(BaseModel):
    """The fields of a request that say what form its answers have: at most one of them."""

    response_format: ResponseFormat = ResponseFormat()
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    @property
    def structured_field(self) -> str:
        """The field that says what form the answers have; empty: none does.

        RequestError if several do.
        """
        names = [*self._builders]
        if len(names) > 1:
            raise RequestError(
                f"{' and '.join(names)} exclude each other; expected one of them",
                _field(names[1]),
            )
        return names[0] if names else ""

    def constraint(self) -> str:
        """What the answers must follow, as in `SamplingParams.grammar`; empty: anything.

        RequestError, with the place, for what cannot be followed. May take a tenth of a second.
        """
        name = self.structured_field
        if not name:
            return ""
        try:
            return self._builders[name]()
        except RequestError as error:
            raise RequestError(f"{name}: {error}", _field(name)) from error

    @property
    def _builders(self) -> Mapping[str, Builder]:
        """What builds the constraint, by the field that asks for it."""
        builders: dict[str, Builder | None] = {
            "response_format": self._response_builder(),
            "guided_json": _json(self.guided_json),
            "guided_regex": _regex(self.guided_regex),
            "guided_choice": _choice(self.guided_choice),
            "guided_grammar": _lark(self.guided_grammar),
        }
        if self.structured_outputs is not None:
            for name, build in self.structured_outputs.builders.items():
                builders[f"structured_outputs.{name}"] = build
        return {name: build for name, build in builders.items() if build is not None}

    def _response_builder(self) -> Builder | None:
        form = self.response_format
        if form.type == "text":
            return None
        if form.type == "json_object":
            return constraints.json_object
        if form.json_schema is None:
            raise RequestError(
                'response_format is of type json_schema; expected "json_schema": '
                '{"name": ..., "schema": {...}} in it',
                "response_format",
            )
        return _json(form.json_schema.fields)


def _json(schema: Any) -> Builder | None:
    return None if schema is None else lambda: constraints.json_schema(schema)


def _regex(pattern: str | None) -> Builder | None:
    return None if pattern is None else lambda: constraints.regex(pattern)


def _choice(options: Sequence[str] | None) -> Builder | None:
    return None if options is None else lambda: constraints.choice(options)


def _lark(grammar: str | None) -> Builder | None:
    return None if grammar is None else lambda: constraints.lark(grammar)


def _field(name: str) -> str:
    """The field of a request in which a value is."""
    return name.partition(".")[0]
