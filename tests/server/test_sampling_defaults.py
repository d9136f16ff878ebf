"""Requests that say nothing get the sampling of the model's authors; the rest get what they say."""

import json

import pytest
from starlette.types import ASGIApp

from disagg.config import load_config
from disagg.server.app import create_app
from disagg.server.completions import Completions
from tests.server.conftest import FakeRouter, completions_of
from tests.server.visits import chat, get, post, refused

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


def app_of(router: FakeRouter, **defaults: float) -> ASGIApp:
    return create_app(completions_of(router, defaults=defaults))


@pytest.mark.parametrize("send", [post, chat])
def test_a_request_that_says_nothing_is_one_that_says_the_defaults(send, router):
    send(app_of(router, **DEFAULTS), seed=7)
    send(app_of(router), seed=7, **DEFAULTS)

    (_, unsaid, _), (_, said, _) = router.asked
    assert unsaid == said
    assert unsaid["temperature"] == 0.6


@pytest.mark.parametrize("send", [post, chat])
def test_what_a_request_says_counts_even_if_it_is_openais_default(send, router):
    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}

    send(app_of(router, **DEFAULTS), **own)

    (_, params, _) = router.asked[0]
    assert {name: params[name] for name in own} == own


def test_null_stands_for_the_default_of_the_model(router):
    post(app_of(router, **DEFAULTS), temperature=None)

    assert router.asked[0][1]["temperature"] == 0.6


def test_a_default_length_is_for_chats_that_say_none(router):
    app = app_of(router, max_tokens=5)

    chat(app, max_tokens=None)
    chat(app, max_tokens=7)
    chat(app, max_tokens=-1)
    chat(app, max_tokens=None, min_tokens=6)

    # the prompt has 4 of 20 tokens
    assert [params["max_tokens"] for _, params, _ in router.asked] == [5, 7, 16, 6]


def test_models_tell_the_defaults(router):
    (model,) = get(app_of(router, **DEFAULTS), "/v1/models").json()["data"]

    assert model["default_sampling_params"] == DEFAULTS


def test_the_settings_choose_defaults_and_context(router, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"temperature": 0.25}))
    flags = {"model.generation_config": str(file), "model.context": 100}

    completions = Completions.load(load_config(None, flags), "tiny", router, {})

    assert completions.served.defaults == {"temperature": 0.25}
    assert completions.served.context_length == 100


def test_a_prompt_beyond_the_context_is_refused_by_its_number(router):
    message = refused(
        post(app_of(router), prompt="a" * 21), 400, "prompt_too_long", "prompt"
    )

    assert "context of 20" in message


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_as_many_as_fit_in_a_chat(name, router):
    chat(app_of(router), **{"max_tokens": None, name: -1})

    assert router.asked[0][1]["max_tokens"] == 16


def test_minus_one_is_as_many_as_fit_in_a_completion(router):
    post(app_of(router), max_tokens=-1)

    assert router.asked[0][1]["max_tokens"] == 17


@pytest.mark.parametrize("limit", [0, -2, -736])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_other_lengths_are_refused_with_those_of_prompt_and_context(
    name, limit, router
):
    answer = chat(app_of(router), **{"max_tokens": None, name: limit})

    message = refused(answer, 400, "request", "max_tokens")
    assert f"is {limit}; expected at least 1, or -1" in message
    assert "The prompt has 4 tokens; the context of 20 has room for 16" in message


def test_a_length_beyond_the_context_is_cut(router):
    chat(app_of(router), max_tokens=10**9)

    assert router.asked[0][1]["max_tokens"] == 16
