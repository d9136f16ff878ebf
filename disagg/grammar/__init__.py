"""Answers that follow a grammar: JSON of a schema, a regular expression, a choice, tool calls.

    server, LLM    a *constraint*: one text, which travels in `SamplingParams.grammar`
    engine         the constraint compiled for the vocabulary of a model; a mask of the tokens that
                   may come next, as a pure function of the tokens so far

A constraint is a grammar of llguidance: a Lark grammar, or JSON `{"grammars": [...]}`. A special
token stands in it as `<[ID]>`. Knows no model, no HTTP, no tensors.
"""

from disagg.grammar.constraints import (
    choice,
    json_object,
    json_schema,
    lark,
    regex,
)

__all__ = [
    "choice",
    "json_object",
    "json_schema",
    "lark",
    "regex",
]
