"""Whatever a client sends has an answer, or a refusal that names the field; we never fail."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from disagg.engine.sequence import SamplingParams
from disagg.errors import RequestError
from disagg.server import json_pieces, limits
from disagg.server.app import create_app
from disagg.server.reader import MAX_UNKNOWN_FIELDS
from disagg.server.schema import (
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from tests.model.tiny import save_tiny
from tests.server.conftest import FakeRouter, completions_of
from tests.server.running import running
from tests.server.visits import ask, assert_counted, chat, post, refused, send

Request = tuple[str, dict[str, Any], Any]  # path, fields, messages
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HUGE = 2**64  # does not fit where integers of 64 bits are wanted


def predicting(content):
    return {"type": "content", "content": content}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": 5}, "prompt", "a text or a list of token ids"),
        ({"prompt": [256]}, "prompt", "256 is not a token id"),
        ({"prompt": [256], "echo": True}, "prompt", "prompt: 256 is not a token id"),
        (
            {"prompt": [-3]},
            "prompt",
            "-3 is not a token id; expected an integer from 0 to 255",
        ),
        ({"prompt": [1, True]}, "prompt", "True is not a token id"),
        ({"prompt": ["a", 5]}, "prompt", "or a list of these; not 5"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({"prompt": ["a"] * 64, "n": 3}, "n", "the request asks for 192 answers"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; expected at least 1"),
        ({"max_tokens": -2}, "max_tokens", "expected at least 1, or -1"),
        ({"max_tokens": -736}, "max_tokens", "The prompt has 3 tokens"),
        ({"max_tokens": -736}, "max_tokens", "the context of 20 has room for 17"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
        ({"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
        (
            {"frequency_penalty": -2.1},
            "frequency_penalty",
            "greater than or equal to -2",
        ),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"logit_bias": {"256": 1}}, "logit_bias", "256 is not a token id"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "integer"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "less than or equal to 100"),
        ({"stop_token_ids": [256]}, "stop_token_ids", "256 is not a token id"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
        ({"max_tokens": HUGE}, "max_tokens", "less than or equal to"),
        ({"top_k": HUGE}, "top_k", "less than or equal to"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"seed": HUGE}, "seed", "less than"),
        ({"seed": -HUGE}, "seed", "greater than"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.01}, "top_p", "less than or equal to 1"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": "x" * 257}, "stop", "at most 256"),
        ({"codec": "x" * 20_000}, "codec", "at most"),
        ({"model": "x" * 2000}, "model", "at most"),
        (
            {"stream_options": 5},
            "stream_options",
            "stream_options is 5: expected an object",
        ),
        ({"stop": ["a", 5]}, "stop", "stop[1] is 5: Input should be a valid string"),
        ({"prediction": "x"}, "prediction", "prediction is 'x': expected an object"),
        (
            {"prediction": {"type": "content"}},
            "prediction",
            "prediction.content is required",
        ),
        (
            {"prediction": {"type": "text", "content": "x"}},
            "prediction",
            "prediction.type is 'text': Input should be 'content'",
        ),
        (
            {"prediction": {"type": "content", "content": 5}},
            "prediction",
            "prediction.content is 5: Input should be a valid string",
        ),
        (
            {"prediction": {"type": "content", "content": ["x"]}},
            "prediction",
            'prediction.content[0] is \'x\'; expected {"type": "text"',
        ),
        (
            {"max_tokens": []},
            "max_tokens",
            "max_tokens is []: Input should be a valid integer",
        ),
        ({"logit_bias": {"x" * 500: 1}}, "logit_bias", "logit_bias.xxx"),
        ({"echo": [[["x" * 99] * 9] * 9] * 9}, "echo", "echo is [[[...], "),
        (
            {"kv_transfer_params": {"tp_size": "x"}},
            "kv_transfer_params",
            "params.tp_size is 'x'",
        ),
        (
            {"temperature": 1e30},
            "temperature",
            "temperature is 1e+30: Input should be less than",
        ),
        ({"codec": ""}, "codec", "codec is ''"),
        (
            {"min_tokens": 5},
            "min_tokens",
            "min_tokens is 5; expected at most max_tokens, 4",
        ),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "write max_tokens"),
    ],
    ids=lambda value: str(value)[:32] if isinstance(value, dict) else "",
)
def test_a_field_out_of_its_bounds_is_named(fields, param, says, app, router):
    for stream in (False, True):
        message = refused(post(app, **fields, stream=stream), 400, "request", param)
        assert says in message
        assert len(message) < 200
    assert not router.asked


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"content": "x"}], "messages[0].role is required"),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content is 5: Input should be a valid str",
        ),
        ([5], "messages[0] is 5: expected an object"),
        ([{"role": "user", "content": ""}] * 20_000, "at most 16384 items"),
        (
            [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}],
            "is not a text part",
        ),
        ([{"role": "user"}], "messages[0].content is required of role 'user'"),
        (
            [{"role": "user", "content": None}],
            "messages[0].content is required of role 'user'",
        ),
        (
            [{"role": "assistant", "audio": {"id": "a"}}],
            "messages[0].audio={'id': 'a'} is not supported",
        ),
        (
            [{"role": "assistant", "function_call": {"name": "f"}}],
            "messages[0].function_call={'name': 'f'} is not supported; write tool_calls",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": 5}]}],
            "messages[0].tool_calls[0].function is 5: expected an object",
        ),
        (
            [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
            "is not a text part",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "is not a text part",
        ),
    ],
)
def test_a_message_that_is_wrong_is_named_with_its_place(messages, says, app):
    assert says in refused(chat(app, messages=messages), 400, "request", "messages")


def test_what_is_said_to_the_template_itself_has_the_last_word():
    body = {
        "messages": [],
        "chat_template_kwargs": {"add_generation_prompt": False, "x": 1},
    }
    options = ChatRequest.read(json.dumps(body).encode()).template_options
    assert options == {
        "add_generation_prompt": False,
        "continue_final_message": False,
        "x": 1,
    }


def test_who_wants_nothing_tokenised_or_two_things_hears_what_may_be(app):
    both = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for body in ({}, {"messages": []}, both):
        response = send(app, "POST", "/tokenize", json=body)
        assert "a prompt or messages" in refused(response, 400, "request", "prompt")


INFINITE = [
    f'{{"prompt": "a", "temperature": {x}}}' for x in ("1e999", "Infinity", "NaN")
]


@pytest.mark.parametrize(
    "body", ["", "[]", "5", "{", "[" * 10_000, '{"a": 1e}', "\ud800", *INFINITE]
)
def test_a_body_that_is_no_json_object_is_refused(body, app):
    content = body.encode("utf-8", "surrogatepass")
    response = send(app, "POST", "/v1/completions", content=content)
    assert refused(
        response, 400, "request", "temperature" if body in INFINITE else None
    )


@pytest.mark.parametrize(
    ("ask", "field", "value", "says"),
    [
        (post, "prompt", "x" * 20, "20 tokens"),
        (post, "prompt", "x" * 41, "41 characters"),
        (post, "prompt", [1] * 20, "20 tokens"),
        (chat, "messages", [{"role": "user", "content": "x" * 20}], "22 tokens"),
        (chat, "messages", [{"role": "user", "content": "x" * 41}], "43 characters"),
        (chat, "prediction", predicting("x" * 21), "prediction has 21 ids"),
        (chat, "prediction", predicting("x" * 41), "41 characters"),
    ],
    ids=[
        "tokens",
        "characters",
        "ids",
        "chat-tokens",
        "chat-characters",
        "predicted-tokens",
        "predicted-characters",
    ],
)
def test_what_the_context_cannot_hold_is_too_long_by_its_field(
    ask, field, value, says, app
):
    assert says in refused(ask(app, **{field: value}), 400, "prompt_too_long", field)


CHAT_SCORES = {"logprobs": True, "top_logprobs": 4}


@pytest.mark.parametrize(
    ("ask", "fields", "scores"),
    [
        (post, {"logprobs": 4}, 4 * 5),
        (post, {"logprobs": 0, "n": 3}, 3 * 4),
        (post, {"logprobs": 4, "prompt": ["abc", "de"], "n": 2}, 2 * 2 * 4 * 5),
        (post, {"logprobs": 4, "echo": True, "n": 2}, 2 * (3 + 4) * 5),
        (chat, CHAT_SCORES, 4 * 5),
        (chat, {**CHAT_SCORES, "max_tokens": None}, (20 - 4) * 5),
    ],
    ids=["one", "answers", "prompts", "echo", "chat", "chat-to-the-end"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_whole_request_have_a_limit(
    ask, fields, scores, stream, app, monkeypatch
):
    monkeypatch.setattr(limits, "MAX_SCORES", scores)
    assert ask(app, **fields, stream=stream).status_code == 200

    monkeypatch.setattr(limits, "MAX_SCORES", scores - 1)
    answer = ask(app, **fields, stream=stream)
    assert f"up to {scores}" in refused(answer, 400, "request", "logprobs")


def test_log_probabilities_of_a_prompt_have_a_limit_of_their_own(app, monkeypatch):
    monkeypatch.setattr(limits, "MAX_PROMPT_SCORES", 14)

    answer = post(app, logprobs=4, echo=True)

    assert "the prompt would have 15" in refused(answer, 400, "request", "logprobs")
    assert post(app, logprobs=4).status_code == 200


def test_more_ids_than_the_context_holds_are_not_turned_into_text(app):
    assert (
        send(app, "POST", "/detokenize", json={"tokens": [65] * 20}).json()["prompt"]
        == "b" * 20
    )
    response = send(app, "POST", "/detokenize", json={"tokens": [65] * 1_000_000})
    message = refused(response, 400, "prompt_too_long", "tokens")
    assert message == "tokens has 1,000,000 ids; the model's context holds at most 20"


def test_a_text_is_tokenised_beside_the_loop_and_never_if_too_long(
    app, completions, monkeypatch
):
    threads, encode = [], completions.tokenizer.encode

    def encoded(*arguments: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*arguments)

    monkeypatch.setattr(completions.tokenizer, "encode", encoded)
    assert post(app, prompt="x" * 3_000_000).status_code == 400
    assert threads == []
    assert post(app, prompt="abc").status_code == 200
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_a_body_beyond_the_limit_is_refused_without_being_read(router):
    app = create_app(completions_of(router, longest_token=10**9, max_body_bytes=5000))
    read: list[int] = []

    async def chunks() -> Any:
        for index in range(1000):
            read.append(index)
            yield b" " * 1000

    response = send(app, "POST", "/v1/completions", content=chunks())
    assert "5,000 bytes" in refused(response, 413, "too_large")
    whole = json.dumps(ask(prompt="x")).encode()
    filled = whole + b" " * (5000 - len(whole))
    assert send(app, "POST", "/v1/completions", content=filled).status_code == 200
    assert len(read) == 6
    assert len(router.asked) == 1


def test_a_body_of_too_many_fields_is_refused(app):
    fields = {f"field{i}": 1 for i in range(2000)}
    assert "2002 fields; expected at most 1024" in refused(
        post(app, **fields), 400, "request"
    )


@pytest.mark.parametrize("coding", ["gzip", "zstd", "identity"])
def test_a_compressed_body_is_refused_as_such(coding, app):
    headers = {"Content-Encoding": coding}
    response = send(app, "POST", "/v1/completions", json=ask(), headers=headers)
    if coding == "identity":
        assert response.status_code == 200
    else:
        assert "compressed" in refused(response, 415, "request")
        assert response.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("name", ["tiny", "/models/tiny", "", None])
def test_the_model_has_the_name_it_is_served_by_and_the_one_it_was_loaded_by(name, app):
    assert post(app, model=name).json()["model"] == "tiny"


def test_another_model_is_not_found(app):
    assert "'tiny' is" in refused(post(app, model="gpt-4"), 404, "model", "model")


def test_null_is_the_default_wherever_openai_allows_it(app, router):
    names = {*CompletionRequest.model_fields, *NEUTRAL, "user"} - {"prompt"}
    assert post(app, **dict.fromkeys(names)).status_code == 200
    ((_, params, codec),) = router.asked
    assert params.pop("seed") >= 0
    usual = SamplingParams(temperature=1.0, logit_bias=[], stop_token_ids=[])
    assert SamplingParams(**params) == usual
    assert codec == "raw"


@pytest.mark.parametrize("form", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize(("name", "value"), NEUTRAL.items(), ids=NEUTRAL.keys())
def test_what_is_not_built_is_refused_unless_it_would_change_nothing(
    name, value, form, app
):
    if name in form.model_fields:
        pytest.skip("it is built")
    ask = chat if form is ChatRequest else post
    assert ask(app, **{name: value}).status_code == 200
    assert f"{name}=" in refused(ask(app, **{name: [3]}), 400, "request", name)


def test_the_neutral_values_of_numbers_and_switches_are_not_confused():
    assert CompletionRequest.read(b'{"prompt": "a", "length_penalty": 1.0}')
    for body in (b'{"prompt": "a", "echo": 0.5}', b'{"prompt": "a", "best_of": true}'):
        with pytest.raises(RequestError, match=r"is not supported|valid boolean"):
            CompletionRequest.read(body)


def test_unknown_fields_are_ignored_with_one_warning_each(app, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert (
                post(app, flavour="mint", user="me", **{"x" * 1000: 1}).status_code
                == 200
            )
        assert caplog.text.count("'flavour'") == 1
        assert "'user'" not in caplog.text
        assert "of a request is" in caplog.text
        assert max(map(len, caplog.messages)) < 200
        post(app, **{f"field{index}": 1 for index in range(2 * MAX_UNKNOWN_FIELDS)})
    assert len(caplog.messages) == MAX_UNKNOWN_FIELDS


def test_of_fields_that_are_not_used_only_the_names_are_kept():
    body = ask(metadata=[1], user="me", flavour={"mint": True}, logprobs=None)

    request = CompletionRequest.read(json.dumps(body).encode())

    assert request.model_extra == {}
    assert request.unknown == ["flavour"]


def test_a_long_unused_field_is_no_reason_to_refuse(app):
    assert post(app, metadata=[[]] * limits.LONG_BODY_BYTES).status_code == 200


def test_a_long_unsupported_field_is_refused(app):
    answer = post(app, tools=[[]] * limits.LONG_BODY_BYTES)

    assert "tools=" in refused(answer, 400, "request", "tools")


def test_a_long_body_is_parsed_on_another_thread(app, monkeypatch):
    threads = []
    parse = json_pieces.parse

    def parse_and_note(*arguments):
        threads.append(threading.current_thread())
        return parse(*arguments)

    monkeypatch.setattr(json_pieces, "parse", parse_and_note)

    post(app)
    post(app, user="x" * limits.LONG_BODY_BYTES)

    short, long = threads
    assert short is threading.main_thread()
    assert long is not threading.main_thread()


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (CompletionRequest, ask(prompt="a long story", n=2)),
        (ChatRequest, {"messages": [{"role": "user", "content": "a long story"}]}),
        (
            CompletionRequest,
            ask(prompt=[1] * 12, prediction=predicting("the story")),
        ),
    ],
    ids=["completion", "chat", "prediction"],
)
def test_a_request_is_answered_without_its_text(form, body, completions):
    generation = asyncio.run(completions.prepare(form(**body)))

    assert "story" not in repr(generation)
    assert generation.request.n == body.get("n", 1)
    assert len(generation.prompts[0].tokens) >= len("a long story")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.just(10**4000),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)
ANY_OF = dict.fromkeys(("role", "content", "name", "refusal", "tool_calls"), VALUES)
MESSAGES = st.lists(st.fixed_dictionaries({}, optional=ANY_OF), max_size=3)
NAMES = {
    "/v1/completions": [*CompletionRequest.model_fields, *NEUTRAL],
    "/v1/chat/completions": [*ChatRequest.model_fields, *NEUTRAL],
    "/tokenize": [*TokenizeRequest.model_fields],
    "/detokenize": ["tokens"],
}
GOOD = {
    "prompt": "abc",
    "messages": [{"role": "user", "content": "a"}],
    "tokens": [1, 2],
}
BODIES = st.sampled_from(sorted(NAMES)).flatmap(
    lambda path: st.tuples(
        st.just(path),
        st.dictionaries(
            st.sampled_from(NAMES[path]) | st.text(max_size=5), VALUES, max_size=6
        ),
        st.none() | MESSAGES,
    )
)


def assert_answered(
    ask: Callable[[str, bytes], httpx.Response], request: Request
) -> None:
    """Well or badly; but by what was asked, and with a body that says so."""
    path, fields, messages = request
    good = {
        name: GOOD[name]
        for name in ("prompt", "messages", "tokens")
        if name in NAMES[path]
    }
    good |= (
        {"messages": messages} if messages is not None and "messages" in good else {}
    )
    try:
        body = json.dumps(good | fields)
    except ValueError:  # an integer that Python does not print
        return
    response = ask(path, body.encode())
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def strict() -> ASGIApp:
    """An application that fails where an engine would refuse what it is told."""

    class Router(FakeRouter):
        async def generate(
            self,
            prompt: Any,
            params: Any,
            codec: str,
            at: Any = None,
            client: str = "",
            prediction: Any = (),
            request_id: str = "",
        ) -> Any:
            SamplingParams(**params)
            async for output in super().generate(prompt, params, codec):
                yield output

    return create_app(completions_of(Router()))


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(BODIES)
def test_no_body_makes_the_service_fail(strict, body):
    assert_answered(
        lambda path, content: send(strict, "POST", path, content=content), body
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_bodies_leave_workers_as_they_were(tmp_path):
    folder = save_tiny("llama", tmp_path)
    (folder / "chat_template.jinja").write_text(CHAT)
    with (
        running(str(folder)) as service,
        httpx.Client(base_url=service.url, timeout=30) as client,
    ):

        @settings(
            suppress_health_check=list(HealthCheck), deadline=None, max_examples=2000
        )
        @given(BODIES)
        def answer(body: Request) -> None:
            assert_answered(
                lambda path, content: client.post(path, content=content), body
            )

        answer()
        service.empty()
        good = client.post("/v1/completions", json=ask(max_tokens=3))
        assert good.json()["usage"]["completion_tokens"] == 3


def test_refusals_are_counted_by_reason_and_not_as_successes(app):
    for fields in (
        {"n": 0},
        {"max_tokens": 0},
        {"prompt": "x" * 30},
        {"model": "other"},
    ):
        post(app, **fields)
    failed = "disagg_request_failures_total{{reason={}}}".format
    expected = {failed("request"): 2, failed("prompt_too_long"): 1, failed("model"): 1}
    figures = assert_counted(app, expected)
    assert not any(name.startswith("vllm:request_success_total") for name in figures)
