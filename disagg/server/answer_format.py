"""How a model's answers are read, and what makes them call a tool. No HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.errors import RequestError
from disagg.grammar.calls import CALL_NOTATIONS, tool_calls
from disagg.grammar.constraints import behind, behind_thought, either
from disagg.parsers.answer import AnswerParser
from disagg.parsers.channels import FINAL_CHANNEL, THOUGHT_CHANNEL
from disagg.parsers.formats import NONE, AnswerFormats, ReasoningFormat
from disagg.server.schema import ChatRequest
from disagg.server.tools import Tool

MARK_CHARS = 256  # at the end of a prompt, where a thought may begin


@dataclass(frozen=True)
class AnswerReading:
    """How the answers to one prompt are read.

    tools:      the functions that they may call: the JSON schemas of their parameters by name
    prompt_end: the last characters of the prompt
    parallel:   false: an answer ends behind its first call
    only_calls: a grammar allows nothing but calls behind a thought
    """

    formats: AnswerFormats
    tools: Mapping[str, Mapping[str, Any]] | None
    prompt_end: str
    special_tokens: Mapping[str, int] = field(repr=False)
    parallel: bool = True
    only_calls: bool = False

    @property
    def has_thoughts(self) -> bool:
        """Whether thoughts are separated from the rest of an answer."""
        return self.formats.reasoning is not None

    def parser(self) -> AnswerParser:
        """A parser of one answer."""
        return AnswerParser(
            self.formats, self.tools, self.prompt_end, self.special_tokens
        )


@dataclass(frozen=True)
class ModelFormats:
    """The formats of a model's answers.

    leaves_calls:   calls are left in the text, as the owner of the service wants it
    special_tokens: of the tokenizer: ids by how they are written
    """

    formats: AnswerFormats = field(default_factory=AnswerFormats)
    leaves_calls: bool = False
    special_tokens: Mapping[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def choose(
        cls,
        template: str,
        tool_parser: str,
        reasoning_parser: str,
        special_tokens: Mapping[str, int],
    ) -> "ModelFormats":
        """Those of a model with this chat template; UnknownNameError for a name of no parser."""
        formats = AnswerFormats.choose(template, tool_parser, reasoning_parser)
        return cls(formats, tool_parser == NONE, special_tokens)

    @property
    def names(self) -> dict[str, str | None]:
        """The names of both parsers; None: there is none."""
        tool, reasoning = self.formats.tool, self.formats.reasoning
        return {
            "tool_parser": None if tool is None else tool.name,
            "reasoning_parser": None if reasoning is None else reasoning.name,
        }

    def reading(self, request: ChatRequest, prompt: str) -> AnswerReading | None:
        """How the answers to a prompt are read; None: as plain text.

        RequestError for tools whose calls no parser reads.
        """
        tools = self._readable(request.callable_tools)
        if not tools and self.formats.reasoning is None:
            return None
        return AnswerReading(
            self.formats,
            _schemas(tools) if tools else None,
            prompt[-MARK_CHARS:],
            self.special_tokens,
            parallel=_is_parallel(request),
            only_calls=request.tool_choice.mode == "required",
        )

    def _calls(self, request: ChatRequest) -> str:
        """The grammar of an answer that calls tools.

        RequestError for a model whose calls are not read, and for a schema that grammars do not
        have.
        """
        if self.formats.tool is None:
            raise RequestError(
                "tool_choice forces a call, but the calls of this model are left in the text; "
                'use "auto", or serve the model with another --tool-parser',
                "tool_choice",
            )
        notation = CALL_NOTATIONS[self.formats.tool.name]
        functions = _schemas(request.callable_tools)
        parallel = _is_parallel(request)
        try:
            return tool_calls(
                functions, notation, self.special_tokens, parallel=parallel
            )
        except RequestError as error:
            error.param = "tools"
            raise

    def grammar(self, request: ChatRequest, prompt: str) -> str:
        """What an answer must follow that has a form, or must call a tool.

        An answer that has a form and may call tools does the one or the other. RequestError for
        what cannot be followed, and for a form of an answer that must call a tool.
        """
        calls, form = "", ""
        if request.tool_choice.mode == "required":
            if request.structured_field:
                raise RequestError(
                    f"tool_choice forces a call, so {request.structured_field} cannot be "
                    "followed; leave one of them out",
                    "tool_choice",
                )
            calls = self._calls(request)
        else:
            form = request.constraint()
            if request.callable_tools and self.formats.tool is not None:
                calls = self._calls(request)
        reasoning = self.formats.reasoning
        channels = reasoning.channels if reasoning is not None else None
        if channels is not None and form:
            mark = f"{channels.channel}{FINAL_CHANNEL}{channels.message}"
            form = behind(mark, form, self.special_tokens)
        constraint = either(calls, form) if calls and form else calls or form
        return self._behind_thought(constraint, prompt)

    def _behind_thought(self, constraint: str, prompt: str) -> str:
        """A constraint of the answer proper, which a thought may precede."""
        reasoning = self.formats.reasoning
        if reasoning is None:
            return constraint
        begin, end = _marks(reasoning)
        is_open = reasoning.is_open(prompt)
        return behind_thought(constraint, begin, end, self.special_tokens, is_open)

    def _readable(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """The tools whose calls are read: all or none."""
        if self.formats.tool is not None:
            return tools
        if tools and not self.leaves_calls:
            raise RequestError(
                "tools: the chat template of this model writes calls in a format that no parser "
                "reads; choose one with --tool-parser, or none for calls as they are written",
                "tools",
            )
        return []


def _is_parallel(request: ChatRequest) -> bool:
    """Whether an answer may have several calls."""
    return request.parallel_tool_calls and not request.tool_choice.is_named


def _schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    return {tool.name: tool.parameters for tool in tools}


def _marks(reasoning: ReasoningFormat) -> tuple[str, str]:
    """What stands around a thought."""
    channels = reasoning.channels
    if channels is None:
        return reasoning.begin, reasoning.end
    begin = f"{channels.channel}{THOUGHT_CHANNEL}{channels.message}"
    return begin, f"{channels.ends[0]}{channels.start}assistant"
