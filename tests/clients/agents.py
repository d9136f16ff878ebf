"""Python clients with tools against two services: python agents.py FORCED_URL SPEAKING_URL.

FORCED_URL:   its model obeys grammars alone, so calls are forced
SPEAKING_URL: its model calls get_weather, and then answers
Prints one JSON object.
"""

import json
import sys
from typing import Any, Literal

import litellm
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Is it raining in Oslo?"
LIMIT = 400


class Trip(BaseModel):
    """Go there."""

    model_config = ConfigDict(
        extra="forbid"
    )  # else a weak model adds fields without end

    days: int = Field(ge=1, le=3)
    by: Literal["train", "ship"]


TRIP = {
    "type": "function",
    "function": {"name": "Trip", "parameters": Trip.model_json_schema()},
}


def with_litellm(url: str) -> dict[str, Any]:
    request = {
        "model": "openai/tiny",
        "api_base": f"{url}/v1",
        "api_key": "any",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [TRIP],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": LIMIT,
        "temperature": 0,
    }
    whole = litellm.completion(**request)
    chunks = [*litellm.completion(**request, stream=True)]
    streamed = litellm.stream_chunk_builder(chunks)
    return {
        name: [
            answer.choices[0].finish_reason,
            answer.choices[0].message.tool_calls[0].function.arguments,
        ]
        for name, answer in {"whole": whole, "streamed": streamed}.items()
    }


def langchain_model(url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="tiny",
        base_url=f"{url}/v1",
        api_key="any",
        temperature=0,
        max_tokens=LIMIT,
        max_retries=0,
    )


def with_langchain(url: str) -> dict[str, Any]:
    model = langchain_model(url)
    forced = model.bind_tools([Trip], tool_choice="required", parallel_tool_calls=False)
    answers: dict[str, Any] = {
        method: model.with_structured_output(Trip, method=method).invoke(QUESTION)
        for method in ("json_schema", "function_calling")
    }
    answers = {name: answer.model_dump() for name, answer in answers.items()}
    return answers | {"call": forced.invoke(QUESTION).tool_calls[0]["args"]}


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is wet in {city}."


def langchain_loop(url: str) -> list[str]:
    """What the tool and then the model say."""
    model = langchain_model(url).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(QUESTION)]
    answer = model.invoke(messages)
    (call,) = answer.tool_calls
    result: ToolMessage = get_weather.invoke(call)
    final = model.invoke([*messages, answer, result])
    return [result.content, final.content]


def pydantic_ai_model(url: str) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="any")
    return OpenAIChatModel("tiny", provider=provider)


def with_pydantic_ai(url: str) -> dict[str, Any]:
    settings = {"max_tokens": LIMIT, "temperature": 0, "parallel_tool_calls": False}
    agent = Agent(pydantic_ai_model(url), output_type=Trip, model_settings=settings)
    return agent.run_sync(QUESTION).output.model_dump()


def pydantic_ai_loop(url: str) -> list[str]:
    """What the tool and then the model say."""
    said = []
    agent = Agent(pydantic_ai_model(url))

    @agent.tool_plain(name="get_weather")
    def look(city: str) -> str:
        """The weather of a city."""
        said.append(f"It is wet in {city}.")
        return said[-1]

    output = agent.run_sync(QUESTION).output
    return [*said, output]


def main() -> None:
    forced, speaking = sys.argv[1:]
    answers = {
        "litellm": with_litellm(forced),
        "langchain": with_langchain(forced),
        "langchain_loop": langchain_loop(speaking),
        "pydantic_ai": with_pydantic_ai(forced),
        "pydantic_ai_loop": pydantic_ai_loop(speaking),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
