"""The `openai` client, unmodified, against a service with a model behind it."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.model.reference import ReferenceModel
from tests.model.tiny import VOCAB, byte_tokenizer, save_tiny
from tests.server.running import Running, running

TEMPLATE = "{% for t in tools or [] %}{{ t.function | tojson }}<tool_call>{% endfor %}"
TEMPLATE += (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
)
TEMPLATE += "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant:{% endif %}"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0}
TEXT = "Call me Ishmael."
END = "<|end|>"  # a special token
END_ID = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny("llama", tmp_path_factory.mktemp("tiny"))
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Running]:
    with running(str(folder)) as service:
        yield service


@pytest.fixture
def client(service: Running) -> Iterator[openai.OpenAI]:
    """Nothing is left of what a test asked for."""
    with openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="any", max_retries=0
    ) as client:
        yield client
    service.empty()


@pytest.fixture(scope="module")
def logits(folder: Path) -> Any:
    """What the model of transformers says of token ids: log-probabilities [N, V]."""
    return ReferenceModel(str(folder)).logprobs


def ids(text: str, service: Running) -> list[int]:
    return tokenize(service, prompt=text)["tokens"]


def tokenize(service: Running, **body: Any) -> dict[str, Any]:
    return httpx.post(f"{service.url}/tokenize", json=body).json()


def test_the_model_is_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.get("/models/", cast_to=dict)["data"][0]["id"] == "tiny"
    assert client.models.retrieve("tiny").owned_by == "disagg"


def test_prompts_of_every_form_have_answers_in_their_order(client, service):
    forms: list[Any] = [TEXT, ids(TEXT, service), [TEXT], [ids(TEXT, service)]]
    answers = [
        client.completions.create(**GREEDY, prompt=form, max_tokens=6) for form in forms
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1
    both = client.completions.create(
        **GREEDY, prompt=[TEXT, "It was"], max_tokens=6, n=2
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices[:2]] == [
        answers[0].choices[0].text
    ] * 2
    assert both.usage.prompt_tokens == len(TEXT) + len("It was")
    assert both.usage.completion_tokens == 24


def test_choices_of_one_seed_differ_and_come_again(client):
    def draw(seed: int) -> list[str]:
        request = {
            "model": "tiny",
            "prompt": TEXT,
            "n": 3,
            "seed": seed,
            "max_tokens": 8,
        }
        return [choice.text for choice in client.completions.create(**request).choices]

    assert draw(1) == draw(1)
    assert len({*draw(1), *draw(5)}) == 6


@pytest.mark.parametrize(
    ("text", "max_tokens"),
    [
        (TEXT, 0),
        (TEXT, 1),
        (TEXT, 3),
        ("".join(chr(97 + i * i % 26) for i in range(500)), 0),
    ],
    ids=["none", "one", "some", "two-batches"],
)
def test_echo_returns_log_probabilities_of_the_prompt(
    text, max_tokens, client, service, logits
):
    answer = client.completions.create(
        **GREEDY, prompt=text, echo=True, logprobs=2, max_tokens=max_tokens
    )
    (choice,) = answer.choices
    assert choice.text.startswith(text)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens
    tokens = ids(text, service)
    assert len(choice.logprobs.tokens) == len(tokens) + max_tokens
    check_prompt_logprobs(choice.logprobs, tokens, logits(tokens))


def check_prompt_logprobs(logprobs: Any, tokens: list[int], reference: Any) -> None:
    """Those of the prompt are the reference's [N, V]; the first token has none."""
    size = len(tokens)
    assert len(logprobs.top_logprobs) == len(logprobs.tokens)
    assert logprobs.text_offset[:size] == list(range(size))  # a token is a byte

    expected = [float(reference[i, token]) for i, token in enumerate(tokens[1:])]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:size] == pytest.approx(expected, abs=1e-3)

    best = reference.max(-1).values.tolist()[:-1]
    tops = [max(top.values()) for top in logprobs.top_logprobs[1:size]]
    assert tops == pytest.approx(best, abs=1e-3)


def test_offsets_are_places_in_the_text_where_characters_are_several_tokens(client):
    request = GREEDY | {"prompt": "a😀 b", "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = client.completions.create(**request).choices
    assert choice.logprobs.text_offset == [0, 1, 1, 1, 1, 2, 3]  # a token is a byte


def test_a_streamed_answer_is_the_whole_one(client):
    request = GREEDY | {
        "prompt": TEXT,
        "max_tokens": 9,
        "logprobs": 1,
        "n": 2,
        "echo": True,
    }
    whole = client.completions.create(**request)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(**request, stream=True, stream_options=options)
    chunks = list(stream)

    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage for chunk in chunks)
    for choice in whole.choices:
        check_parts(parts_of(chunks, choice.index), choice)


def check_parts(parts: list[Any], choice: Any) -> None:
    """The parts of a stream add up to the choice."""
    logprobs = [part.logprobs for part in parts if part.logprobs]
    tokens = [token for each in logprobs for token in each.tokens]
    offsets = [offset for each in logprobs for offset in each.text_offset]
    assert "".join(part.text for part in parts) == choice.text
    assert parts[-1].finish_reason == choice.finish_reason
    assert tokens == choice.logprobs.tokens
    assert offsets == choice.logprobs.text_offset


def parts_of(chunks: list[Any], index: int) -> list[Any]:
    """The parts of one choice of a stream."""
    return [part for chunk in chunks for part in chunk.choices if part.index == index]


@pytest.fixture
def first_token(client: openai.OpenAI, service: Running) -> int:
    """The first token of the greedy answer to TEXT."""
    answer = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=4, logprobs=0)
    (token,) = ids(answer.choices[0].logprobs.tokens[0], service)
    return token


FOUR_TOKENS = GREEDY | {"prompt": TEXT, "max_tokens": 4}


def test_a_bias_changes_the_answer(client, first_token):
    plain = client.completions.create(**FOUR_TOKENS, logprobs=0)
    biased = client.completions.create(
        **FOUR_TOKENS, logit_bias={str(first_token): -100}
    )

    assert biased.choices[0].text != plain.choices[0].text


def test_a_stop_token_ends_the_answer_after_min_tokens(client, first_token):
    stop = {"stop_token_ids": [first_token]}
    stopped = client.completions.create(**FOUR_TOKENS, extra_body=stop)
    later = client.completions.create(
        **FOUR_TOKENS, extra_body=stop | {"min_tokens": 3}
    )

    assert stopped.choices[0].text == ""
    assert stopped.choices[0].finish_reason == "stop"
    assert later.usage.completion_tokens >= 3


ONLY_ENDS = GREEDY | {
    "max_tokens": 4,
    "n": 2,
    "stop": ["never", END],
    "logit_bias": {str(END_ID): 100},
}


def test_a_special_token_as_stop_string_ends_an_answer(client):
    answer = client.completions.create(**ONLY_ENDS, prompt=TEXT)

    assert [choice.text for choice in answer.choices] == ["", ""]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage.completion_tokens == 2


def test_a_special_token_as_stop_string_ends_a_streamed_chat(client):
    chunks = list(
        client.chat.completions.create(**ONLY_ENDS, messages=MESSAGES, stream=True)
    )

    for index in (0, 1):
        parts = parts_of(chunks, index)
        assert "".join(part.delta.content or "" for part in parts) == ""
        assert parts[-1].finish_reason == "stop"


def test_a_special_token_as_stop_string_waits_for_min_tokens(client):
    answer = client.completions.create(
        **ONLY_ENDS, prompt=TEXT, extra_body={"min_tokens": 3}
    )

    assert answer.usage.completion_tokens >= 6


def test_a_frequency_penalty_keeps_an_answer_from_repeating(client):
    answer = client.completions.create(
        **GREEDY, prompt=TEXT, max_tokens=20, frequency_penalty=2.0
    )

    assert len(set(answer.choices[0].text)) > 5


PARTS = [{"type": "text", "text": "Call me"}, {"type": "text", "text": "x"}]
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}]
MESSAGES += [{"role": "user", "content": PARTS}]
WRITTEN = "system: Be brief.\nuser: Call me\nx\nassistant:"


def test_a_chat_is_a_completion_of_what_the_template_writes(client, service):
    assert tokenize(service, messages=MESSAGES)["tokens"] == ids(WRITTEN, service)
    expected = client.completions.create(**GREEDY, prompt=WRITTEN, max_tokens=7)
    answer = client.chat.completions.create(
        **GREEDY, messages=MESSAGES, max_completion_tokens=7
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == (
        "assistant",
        expected.choices[0].text,
    )
    assert choice.finish_reason == "length"
    assert answer.usage.total_tokens == expected.usage.total_tokens


def test_a_chat_streams_its_deltas_and_the_role_first(client):
    request = GREEDY | {"messages": MESSAGES, "max_tokens": 7, "n": 3, "logprobs": True}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))

    openings = [choice for chunk in chunks[:3] for choice in chunk.choices]
    assert [choice.index for choice in openings] == [0, 1, 2]
    assert [choice.delta.content for choice in openings] == ["", "", ""]
    assert [choice.logprobs for choice in openings] == [None, None, None]
    for choice in whole.choices:
        check_deltas([part.delta for part in parts_of(chunks, choice.index)], choice)


def check_deltas(deltas: list[Any], choice: Any) -> None:
    """The first one has the role; their texts add up to the message."""
    roles = [delta.role for delta in deltas if delta.role]
    text = "".join(delta.content or "" for delta in deltas)
    assert roles == [deltas[0].role] == ["assistant"]
    assert text == choice.message.content


def test_a_chat_tells_log_probabilities(client):
    request = GREEDY | {
        "messages": MESSAGES,
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 3,
    }
    (choice,) = client.chat.completions.create(**request).choices
    assert len(choice.logprobs.content) == 3
    for token in choice.logprobs.content:
        assert token.logprob == max(x.logprob for x in token.top_logprobs)
        assert bytes(token.bytes).decode(errors="replace") == token.token
        assert sum(math.exp(x.logprob) for x in token.top_logprobs) <= 1


def test_a_part_of_a_character_is_told_by_its_own_bytes(client, service):
    lead, *_ = ids("🎉", service)
    request = GREEDY | {"messages": MESSAGES, "max_tokens": 1, "logprobs": True}
    answer = client.chat.completions.create(**request, logit_bias={str(lead): 100})
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.bytes) == ("\ufffd", ["🎉".encode()[0]])


def test_a_stop_string_may_come_of_half_a_character_at_the_end(client, service):
    lead, *_ = ids("🎉", service)
    request = GREEDY | {"prompt": TEXT, "max_tokens": 1, "stop": "\ufffd"}
    (choice,) = client.completions.create(**request, logit_bias={lead: 100}).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")


def test_a_last_message_can_be_continued(client, service):
    messages = [*MESSAGES, {"role": "assistant", "content": "I sh"}]
    written = tokenize(service, messages=messages, continue_final_message=True)[
        "tokens"
    ]
    assert written == ids(WRITTEN + " I sh", service)


REFUSED: list[tuple[type[openai.APIStatusError], dict[str, Any]]] = [
    (openai.BadRequestError, {"messages": []}),
    (openai.BadRequestError, {"messages": [{"role": "tool", "content": "x"}]}),
    (openai.BadRequestError, {"top_logprobs": 2}),
    (openai.NotFoundError, {"model": "gpt-4"}),
    *(
        (
            openai.BadRequestError,
            {"messages": MESSAGES, "extra_body": {"chat_template_kwargs": x}},
        )
        for x in ({"messages": []}, {"self": 1}, {"chat_template": ""})
    ),
]


@pytest.mark.parametrize(("error", "fields"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_cannot_be_answered_is_refused_by_its_name(error, fields, client):
    with pytest.raises(error) as refused:
        client.chat.completions.create(**GREEDY | {"messages": MESSAGES} | fields)
    assert refused.value.param == next(iter(fields))


class Trip(BaseModel):
    """Go there."""

    days: int = Field(ge=1, le=3)
    by: Literal["train", "ship"]


TOOL = openai.pydantic_function_tool(Trip)
NAMED = {"type": "function", "function": {"name": "Trip"}}
FORCED: dict[str, Any] = GREEDY | {
    "messages": [{"role": "user", "content": "Go."}],
    "tools": [TOOL],
    "max_tokens": 200,
}


@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=repr
)
def test_a_forced_call_has_the_arguments_of_its_schema(choice, reason, client):
    answer = client.chat.completions.parse(
        **FORCED, tool_choice=choice, parallel_tool_calls=False
    )

    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "Trip"
    assert isinstance(call.function.parsed_arguments, Trip)
    assert choice.message.content is None
    assert choice.finish_reason == reason


def test_a_forced_call_is_streamed_as_it_is_whole(client):
    request = FORCED | {"tool_choice": NAMED}
    whole = client.chat.completions.create(**request).choices[0].message.tool_calls

    with client.chat.completions.stream(**request) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0].message.tool_calls

    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert [each.function.arguments for each in streamed] == [
        each.function.arguments for each in whole
    ]


RESPONDING: dict[str, Any] = GREEDY | {"input": "Go.", "max_output_tokens": 200}


def test_a_response_has_the_form_of_its_schema(client):
    response = client.responses.parse(**RESPONDING, text_format=Trip)

    assert isinstance(response.output_parsed, Trip)
    assert response.status == "completed"


def test_a_response_is_streamed_as_it_is_whole(client):
    tool = {"type": "function", "name": "Trip", "strict": True}
    tool["parameters"] = TOOL["function"]["parameters"]
    request = RESPONDING | {"tools": [tool], "tool_choice": "required"}
    whole = client.responses.create(**request, parallel_tool_calls=False)

    with client.responses.stream(**request, parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()

    assert kinds[-1] == "response.completed"
    assert [item.type for item in streamed.output] == ["function_call"]
    assert streamed.output[0].arguments == whole.output[0].arguments
    assert Trip.model_validate_json(whole.output[0].arguments)


def test_a_stream_that_is_left_leaves_nothing(client):
    with client.completions.create(
        **GREEDY, prompt=TEXT, max_tokens=400, stream=True
    ) as stream:
        assert next(iter(stream)).choices
    # the fixture waits until every gauge is zero


def test_every_token_of_the_vocabulary_can_be_spelled(service):
    assert spelled(list(range(VOCAB - 4)), service)
    assert spelled(ids(TEXT, service), service) == TEXT


def spelled(tokens: list[int], service: Running) -> str:
    return httpx.post(f"{service.url}/detokenize", json={"tokens": tokens}).json()[
        "prompt"
    ]
