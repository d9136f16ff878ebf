"""The grammar of an answer that must call tools, in the form that a model was trained on.

<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
╰─ before_name ──╯       ╰ before_arguments ╯               ╰ behind ╯
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParameterForm:
    """How arguments are written one by one, where they are not one JSON object.

    A text stands as it is up to `behind`; anything else is JSON.
    """

    before_name: str
    before_value: str
    behind: str


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls; special tokens are written as in its tokenizer.

    before_name, before_arguments, behind: of each call
    before_first, between, behind_last:    of all calls
    parameters: None: the arguments are one JSON object
    """

    before_name: str
    before_arguments: str
    behind: str
    before_first: str = ""
    between: str = ""
    behind_last: str = ""
    parameters: ParameterForm | None = None


# by the name of the tool parser that reads it
CALL_FORMS: Mapping[str, CallForm] = {}


def tool_calls(
    functions: Mapping[str, Mapping[str, Any]],
    form: CallForm,
    special_tokens: Mapping[str, int],
    *,
    parallel: bool,
) -> str:
    """An answer that is one call, or at least one call.

    functions:      the functions that may be called: the JSON schema of their arguments, by name
    special_tokens: of the tokenizer: ids by how they are written
    parallel:       several calls may follow each other

    RequestError, with the name of the function, for a schema that is not supported.
    """
    raise NotImplementedError
