"""Responses of /v1/responses as the `openai` client reads them, whole and streamed."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from disagg.errors import PeerLostError
from disagg.model.tokenizer import Tokenizer
from disagg.parsers.parts import CallArguments, CallBegin, CallEnd, Content, Thought
from disagg.server.items_writer import ItemsWriter
from disagg.server.output_text import TextDelta
from disagg.server.reader import Generation, ServedModel, TokenizedPrompt
from disagg.server.responses_request import ResponsesRequest
from tests.model.tiny import byte_tokenizer
from tests.server.conftest import A

SERVED = ServedModel("tiny", 20, 256, "raw", 2, defaults={"temperature": 0.5})
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CALL = (CallBegin(0, "look"), CallArguments(0, "{}"), CallEnd(0))
DELTAS = [
    TextDelta("", 1, parts=(Thought("Hm"),), num_thought=1),
    TextDelta("", 3, parts=(Thought("."), Content("I lo")), num_thought=2),
    None,  # nothing has arrived for a while
    TextDelta("", 4, parts=(Content("ok."),), num_thought=2),
    TextDelta("", 8, parts=CALL, num_thought=2),
    TextDelta("", 8, finish_reason="stop", num_thought=2, kv={"cached_tokens": 2}),
]
Deltas = Sequence[TextDelta | None]


def writer_of(**fields: Any) -> ItemsWriter:
    body = {"input": "hi", "tools": [LOOK]} | fields
    sent = ResponsesRequest.read(json.dumps(body).encode())
    generation = Generation(sent.chat, [TokenizedPrompt((1, 2, 3))])
    tokenizer = Tokenizer(byte_tokenizer())
    return ItemsWriter(sent, generation, SERVED, tokenizer, lambda: "call_1")


async def arriving(
    deltas: Deltas, error: Exception | None
) -> AsyncGenerator[tuple[int, TextDelta] | None]:
    for delta in deltas:
        yield None if delta is None else (0, delta)
    if error is not None:
        raise error


def whole(deltas: Deltas = DELTAS, **fields: Any) -> dict[str, Any]:
    writer = writer_of(**fields)
    asyncio.run(writer.gather(arriving(deltas, None)))
    return json.loads(b"".join(writer.pieces({})))


def streamed(
    deltas: Deltas = DELTAS, error: Exception | None = None, **fields: Any
) -> str:
    """All events, as they are sent."""

    async def run() -> str:
        writer = writer_of(**fields)
        arrivals = arriving(deltas, error)
        first = await writer.first(arrivals)
        return "".join([text async for text in writer.events(first, arrivals)])

    return asyncio.run(run())


def data_of(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def client_of(text: str, media_type: str = "text/event-stream") -> openai.OpenAI:
    """A client whose service always answers so."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=text, headers={"Content-Type": media_type})

    http = httpx.Client(transport=httpx.MockTransport(answer))
    return openai.OpenAI(base_url="http://test/v1", api_key="any", http_client=http)


def test_a_whole_response_is_of_the_types_of_the_client():
    response = Response.model_validate(whole(metadata={"a": "b"}, user="me"))

    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call"]
    assert response.output_text == "I look."
    assert response.status == "completed"
    assert response.metadata == {"a": "b"}


def test_every_event_is_of_the_types_of_the_client():
    event_type = pydantic.TypeAdapter(ResponseStreamEvent)

    kinds = [event_type.validate_python(x).type for x in data_of(streamed())]

    first, second, *_, last = kinds
    assert (first, second) == ("response.created", "response.in_progress")
    assert last == "response.completed"


def test_events_are_numbered():
    numbers = [event["sequence_number"] for event in data_of(streamed())]

    assert numbers == [*range(len(numbers))]


def test_a_stream_without_news_has_a_comment():
    assert "\n\n: waiting\n\nevent: response.output_text.delta" in streamed()


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{**item, "id": None} for item in response["output"]]
    times = {"id": None, "created_at": None, "completed_at": None}
    return response | times | {"output": items}


def test_the_last_event_has_the_whole_response():
    *_, last = data_of(streamed(include=["reasoning.encrypted_content"]))

    expected = whole(include=["reasoning.encrypted_content"])
    assert without_ids(last["response"]) == without_ids(expected)


def test_usage_counts_thoughts_and_cached_tokens():
    assert whole()["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 11,
    }


def test_the_response_says_what_applied():
    """Nothing is stored or truncated, and the model has a temperature of its own."""
    response = whole(store=True, truncation="auto", top_p=0.25)

    assert (response["store"], response["truncation"]) == (False, "disabled")
    assert (response["temperature"], response["top_p"]) == (0.5, 0.25)


CUT = [*DELTAS[:-1], TextDelta("", 8, finish_reason="length")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_answer_is_incomplete(stream):
    events = data_of(streamed(CUT))

    response = events[-1]["response"] if stream else whole(CUT)

    assert events[-1]["type"] == "response.incomplete"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None


def test_an_answer_that_no_parser_reads_is_a_message():
    deltas = [TextDelta("<think>", 1), TextDelta("", 1, finish_reason="stop")]

    (item,) = whole(deltas)["output"]

    assert item["content"][0]["text"] == "<think>"


def test_thoughts_are_left_out_where_a_client_asks_for_that():
    kinds = [item["type"] for item in whole(include_reasoning=False)["output"]]

    assert kinds == ["message", "function_call"]


@pytest.mark.parametrize("kv", [False, True])
def test_the_figures_of_the_hand_off_come_when_they_are_asked_for(kv):
    assert ("kv" in whole(kv=kv)) == kv


SCORES = [(A, (-0.5, [(A, -0.5)])), (A + 1, (-0.25, []))]


def test_only_a_message_has_log_probabilities():
    deltas = [
        TextDelta("", 1, parts=(Thought("Hm"),), scores=(SCORES[0],)),
        TextDelta("", 2, parts=(Content("a"),), scores=(SCORES[0],)),
        TextDelta("", 3, scores=(SCORES[1],)),
        TextDelta("", 3, finish_reason="stop"),
    ]

    response = Response.model_validate(whole(deltas, top_logprobs=1))

    (part,) = response.output[1].content
    assert [(score.token, score.logprob) for score in part.logprobs] == [
        ("a", -0.5),
        ("b", -0.25),
    ]


def test_a_failure_in_mid_stream_is_two_events():
    """One that the `openai` clients raise, and one that ends the stream for Codex."""
    text = streamed(DELTAS[:3], PeerLostError("prefill-0 left"))

    error, failed = data_of(text)[-2:]

    assert error["error"]["type"] == "peer_lost"
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["message"] == "prefill-0 left"
    assert failed["response"]["status"] == "failed"


def test_the_client_raises_a_failure_in_mid_stream():
    client = client_of(streamed(DELTAS[:3], PeerLostError("prefill-0 left")))

    with pytest.raises(openai.APIError, match="prefill-0 left"):
        [*client.responses.create(input="hi", model="tiny", stream=True)]


def test_the_client_accumulates_a_stream():
    client = client_of(streamed())

    with client.responses.stream(input="hi", model="tiny", tools=[LOOK]) as stream:
        texts = [event.delta for event in stream if event.type.endswith("text.delta")]
        response = stream.get_final_response()

    assert texts == ["Hm", ".", "I lo", "ok."]
    assert response.output_text == "I look."
    assert response.output[2].name == "look"


class Weather(pydantic.BaseModel):
    rain: bool


def test_the_client_parses_an_answer_with_a_schema():
    text = '{"rain": true}'
    deltas = [TextDelta(text, 5), TextDelta("", 5, finish_reason="stop")]
    client = client_of(json.dumps(whole(deltas)), "application/json")

    response = client.responses.parse(input="hi", model="tiny", text_format=Weather)

    assert response.output_parsed == Weather(rain=True)


def test_what_the_client_read_is_its_next_input():
    response = Response.model_validate(whole(include=["reasoning.encrypted_content"]))
    output = [item.model_dump(exclude_none=True) for item in response.output]
    result = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}

    writer_of(input=[*output, result])
