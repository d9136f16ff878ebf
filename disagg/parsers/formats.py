"""The formats of tool calls and of thoughts: tables of data, chosen by a model's chat template.

A *mark* is a text that a model writes around a part of its answer, such as "<tool_call>". Spaces
and line breaks beside marks mean nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from disagg.errors import UnknownNameError

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True)
class JsonCalls:
    """Calls as JSON objects with a name and arguments, or lists of such objects.

        <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>

    begin, end: around the objects; without `end`, they end with the last object
    between:    may stand between two objects
    bare:       an answer that begins with such an object is a call without `begin`
    """

    begin: str
    end: str = ""
    between: str = ","
    bare: bool = False


@dataclass(frozen=True)
class NamedCalls:
    """Calls as a name and a JSON object of arguments.

        [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}

    begin:            before each name
    before_arguments: marks that may stand between name and arguments, in this order
    behind:           marks that may stand behind the arguments, in this order
    before_id:        before an id, which is skipped, between name and arguments
    open, close:      may stand around all calls
    name:             regular expression of what is written for a name; its group is the name
    """

    begin: str
    before_arguments: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    before_id: str = ""
    open: str = ""
    close: str = ""
    name: str = "(.+)"


@dataclass(frozen=True)
class ParameterCalls:
    """Calls whose arguments are written one by one: a key, and a value as bare text.

        <tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>

    begin, behind_name:      around the name; without `behind_name`, a space or a mark ends it
    before_key, behind_key:  around the key
    before_value:            may stand before the value
    behind_value:            ends the value
    end:                     ends the call
    open, close:             may stand around all calls
    string_flag:             behind a key, before "true" or "false": whether the value is a string
    margin:                  may stand once on each side of a value and is no part of it
    """

    begin: str
    behind_name: str
    before_key: str
    behind_key: str
    behind_value: str
    end: str
    before_value: str = ""
    open: str = ""
    close: str = ""
    string_flag: str = ""
    margin: str = ""


@dataclass(frozen=True)
class Channels:
    """Messages with a header that names their channel and recipient, as gpt-oss writes them.

        <|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>final<|message|>...

    start:   before a header
    channel: in a header, before the name of the channel
    message: between header and text
    ends:    behind a text
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")


CallSyntax = JsonCalls | NamedCalls | ParameterCalls | Channels


@dataclass(frozen=True)
class ToolFormat:
    """How models of a family write tool calls.

    sign:     regular expression: in the chat templates of these models
    syntaxes: all that the models may write; the first is theirs today
    """

    name: str
    models: str
    sign: str
    syntaxes: tuple[CallSyntax, ...]


@dataclass(frozen=True)
class ReasoningFormat:
    """How models of a family write thoughts: between two marks, or in a channel of `channels`."""

    name: str
    models: str
    sign: str
    begin: str = ""
    end: str = ""
    channels: Channels | None = None

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends in a thought, so that its answer begins in one."""
        return bool(self.begin) and prompt.rstrip().endswith(self.begin)


# the first whose sign is in a template is taken
TOOL_FORMATS: Sequence[ToolFormat] = (
    ToolFormat(
        "harmony",
        "gpt-oss",
        r"<\|channel\|>",
        (Channels(),),
    ),
    ToolFormat(
        "kimi_k2",
        "Kimi K2",
        r"<\|tool_calls_section_begin\|>",
        (
            NamedCalls(
                begin="<|tool_call_begin|>",
                before_arguments=("<|tool_call_argument_begin|>",),
                behind=("<|tool_call_end|>",),
                open="<|tool_calls_section_begin|>",
                close="<|tool_calls_section_end|>",
                name=r"(?:functions\.)?(.+?)(?::\d+)?",
            ),
        ),
    ),
    ToolFormat(
        "deepseek_v32",
        "DeepSeek V3.2, V4",
        r"DSML",
        tuple(
            ParameterCalls(
                begin='<｜DSML｜invoke name="',
                behind_name='">',
                before_key='<｜DSML｜parameter name="',
                behind_key='">',
                behind_value="</｜DSML｜parameter>",
                end="</｜DSML｜invoke>",
                open=f"<｜DSML｜{section}>",
                close=f"</｜DSML｜{section}>",
                string_flag='" string="',
            )
            for section in ("function_calls", "tool_calls")
        ),
    ),
    ToolFormat(
        "deepseek_v3",
        "DeepSeek V3, R1",
        r"(?s)<｜tool▁calls▁begin｜>.*```json",
        (
            NamedCalls(
                begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                before_arguments=("```json",),
                behind=("```", "<｜tool▁call▁end｜>"),
                open="<｜tool▁calls▁begin｜>",
                close="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    ToolFormat(
        "deepseek_v31",
        "DeepSeek V3.1",
        r"<｜tool▁calls▁begin｜>",
        (
            NamedCalls(
                begin="<｜tool▁call▁begin｜>",
                before_arguments=("<｜tool▁sep｜>",),
                behind=("<｜tool▁call▁end｜>",),
                open="<｜tool▁calls▁begin｜>",
                close="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    ToolFormat(
        "minimax_m2",
        "MiniMax M2",
        r"<minimax:tool_call>",
        (
            ParameterCalls(
                begin='<invoke name="',
                behind_name='">',
                before_key='<parameter name="',
                behind_key='">',
                behind_value="</parameter>",
                end="</invoke>",
                open="<minimax:tool_call>",
                close="</minimax:tool_call>",
            ),
        ),
    ),
    ToolFormat(
        "functionary_v31",
        "Functionary 3.1",
        r"<function=example_function_name>\{",
        (
            NamedCalls(
                begin="<function=", before_arguments=(">",), behind=("</function>",)
            ),
        ),
    ),
    ToolFormat(
        "seed_oss",
        "Seed-OSS",
        r"<seed:tool_call>",
        (
            ParameterCalls(
                begin="<function=",
                behind_name=">",
                before_key="<parameter=",
                behind_key=">",
                behind_value="</parameter>",
                end="</function>",
                open="<seed:tool_call>",
                close="</seed:tool_call>",
            ),
        ),
    ),
    ToolFormat(
        "qwen3_coder",
        "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
        r"(?s)<function=.*<parameter=",
        (
            ParameterCalls(
                begin="<function=",
                behind_name=">",
                before_key="<parameter=",
                behind_key=">",
                behind_value="</parameter>",
                end="</function>",
                open="<tool_call>",
                close="</tool_call>",
                margin="\n",
            ),
        ),
    ),
    ToolFormat(
        "glm45",
        "GLM-4.5 to GLM-5",
        r"<arg_key>",
        (
            ParameterCalls(
                begin="<tool_call>",
                behind_name="",
                before_key="<arg_key>",
                behind_key="</arg_key>",
                before_value="<arg_value>",
                behind_value="</arg_value>",
                end="</tool_call>",
            ),
        ),
    ),
    ToolFormat(
        "mistral",
        "Mistral, Devstral, Magistral",
        r"\[TOOL_CALLS\]",
        (
            NamedCalls(
                begin="[TOOL_CALLS]",
                before_arguments=("[ARGS]",),
                before_id="[CALL_ID]",
            ),
            JsonCalls(begin="[TOOL_CALLS]"),
        ),
    ),
    ToolFormat(
        "cohere",
        "Command R7B, Command A",
        r"<\|START_ACTION\|>",
        (JsonCalls(begin="<|START_ACTION|>", end="<|END_ACTION|>"),),
    ),
    ToolFormat(
        "granite",
        "Granite 3, Phi-4-mini",
        r"<\|tool_call\|>",
        (JsonCalls(begin="<|tool_call|>", end="<|/tool_call|>"),),
    ),
    ToolFormat(
        "apriel",
        "Apriel 1.5, 1.6",
        r"<tool_calls>",
        (JsonCalls(begin="<tool_calls>", end="</tool_calls>"),),
    ),
    ToolFormat(
        "nemotron",
        "Llama-Nemotron, Nemotron Nano 2",
        r"<TOOLCALL>",
        (JsonCalls(begin="<TOOLCALL>", end="</TOOLCALL>"),),
    ),
    ToolFormat(
        "llama3_json",
        "Llama 3.1 to 3.3",
        r'<\|python_tag\|>|\{"name": function name, "parameters"',
        (JsonCalls(begin="<|python_tag|>", between=";", bare=True),),
    ),
    ToolFormat(
        "hermes",
        "Qwen2.5, Qwen3, Hermes, SmolLM3",
        r"<tool_call>",
        (JsonCalls(begin="<tool_call>", end="</tool_call>"),),
    ),
)
REASONING_FORMATS: Sequence[ReasoningFormat] = (
    ReasoningFormat("harmony", "gpt-oss", r"<\|channel\|>", channels=Channels()),
    ReasoningFormat("mistral", "Magistral", r"\[THINK\]", "[THINK]", "[/THINK]"),
    ReasoningFormat(
        "seed_oss", "Seed-OSS", r"<seed:think>", "<seed:think>", "</seed:think>"
    ),
    ReasoningFormat(
        "cohere",
        "Command A, R7B",
        r"<\|START_THINKING\|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
    ),
    ReasoningFormat(
        "think",
        "DeepSeek R1 to V4, Qwen3, GLM-4.5, Kimi K2 Thinking, Nemotron, SmolLM3",
        r"</?think>",
        "<think>",
        "</think>",
    ),
)


@dataclass(frozen=True)
class AnswerFormats:
    """The formats of a model's answers. None: the model has none, or its answers are left raw."""

    tool: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def choose(
        cls, template: str, tool: str = AUTO, reasoning: str = AUTO
    ) -> "AnswerFormats":
        """The formats of a model, by the text of its chat template.

        tool, reasoning: "auto", "none", or the name of a format, whatever the template says

        UnknownNameError for another name; it lists those that exist.
        """
        tools = {each.name: each for each in TOOL_FORMATS}
        reasonings = {each.name: each for each in REASONING_FORMATS}
        return cls(
            _choose(template, tool, tools, "tool parser"),
            _choose(template, reasoning, reasonings, "reasoning parser"),
        )


FormatT = TypeVar("FormatT", ToolFormat, ReasoningFormat)


def _choose(
    template: str, name: str, formats: Mapping[str, FormatT], kind: str
) -> FormatT | None:
    if name == NONE:
        return None
    if name != AUTO:
        if name not in formats:
            raise UnknownNameError.of(kind, name, [AUTO, NONE, *formats])
        return formats[name]
    signed = (each for each in formats.values() if re.search(each.sign, template))
    return next(signed, None)
