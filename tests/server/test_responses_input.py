"""Items of /v1/responses become the messages of a chat."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import RequestError
from disagg.server.responses_input import messages_of, sealed, unsealed

HI = {"role": "user", "content": "hi"}
CALL = {
    "type": "function_call",
    "call_id": "1",
    "name": "look",
    "arguments": '{"at": 2}',
}
CHAT_CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": 2}'},
}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "rain"}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def reasoning(**fields) -> dict:
    return {"type": "reasoning", "summary": [], **fields}


def thought(text: str) -> dict:
    return reasoning(content=[{"type": "reasoning_text", "text": text}])


def test_a_text_is_a_message_of_the_user():
    assert messages_of("hi", None) == [HI]


PARTS = [
    ("user", {"type": "input_text", "text": "hi"}, "hi"),
    ("assistant", {"type": "output_text", "text": "hi", "annotations": []}, "hi"),
    ("assistant", {"type": "refusal", "refusal": "no"}, "no"),
]


@pytest.mark.parametrize(("role", "part", "text"), PARTS)
def test_parts_of_a_message_are_its_text(role, part, text):
    item = {"type": "message", "role": role, "content": [part, part]}

    assert messages_of([item], None) == [{"role": role, "content": f"{text}\n{text}"}]


def test_instructions_join_the_system_messages_behind_them():
    developer = {"role": "developer", "content": "Be kind."}
    system = {"role": "system", "content": "Be true."}
    late = {"role": "developer", "content": "Now in French."}

    messages = messages_of([developer, system, HI, late], "Be brief.")

    joined = {"role": "system", "content": "Be brief.\n\nBe kind.\n\nBe true."}
    assert messages == [joined, HI, late]


def test_what_an_assistant_did_before_a_result_is_one_message():
    items = [HI, thought("Hm."), assistant("Wait."), CALL, {**CALL, "call_id": "2"}]
    results = [RESULT, {**RESULT, "call_id": "2"}]

    messages = messages_of([*items, *results], None)

    one = {
        "role": "assistant",
        "content": "Wait.",
        "reasoning_content": "Hm.",
        "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "2"}],
    }
    tools = [
        {"role": "tool", "tool_call_id": number, "content": "rain"} for number in "12"
    ]
    assert messages == [HI, one, *tools]


def test_two_texts_of_an_assistant_are_two_messages():
    """Such as a comment and the answer, which have phases."""
    items = [assistant("I look."), {**assistant("Rain."), "phase": "final_answer"}]

    assert messages_of(items, None) == [assistant("I look."), assistant("Rain.")]


def test_a_thought_behind_a_text_begins_a_message():
    messages = messages_of([assistant("One."), thought("Hm."), assistant("Two.")], None)

    two = {**assistant("Two."), "reasoning_content": "Hm."}
    assert messages == [assistant("One."), two]


THOUGHTS = {
    "content": thought("Hm."),
    "encrypted": reasoning(encrypted_content=sealed("Hm.")),
    "summary": reasoning(summary=[{"type": "summary_text", "text": "Hm."}]),
}


@pytest.mark.parametrize("item", THOUGHTS.values(), ids=THOUGHTS)
def test_a_thought_is_read_from_wherever_it_is(item):
    (message,) = messages_of([item], None)

    assert message == {**assistant(""), "reasoning_content": "Hm."}


@pytest.mark.parametrize("content", [None, "gAAAAABo", "disagg:%", "disagg:gA=="])
def test_a_thought_that_cannot_be_read_is_left_out(content):
    """OpenAI encrypts its own; Codex sends items without any text."""
    assert messages_of([HI, reasoning(encrypted_content=content)], None) == [HI]


@given(st.text())
def test_a_thought_comes_back_as_it_was(text):
    assert unsealed(sealed(text)) == text


def test_a_result_may_have_parts():
    output = [{"type": "input_text", "text": "rain"}]

    messages = messages_of([CALL, {**RESULT, "output": output}], None)

    assert messages[-1]["content"] == "rain"


def test_the_model_reads_that_a_result_has_an_image():
    """Codex sends it with every later request."""
    output = [{"type": "input_image", "image_url": "data:"}]

    messages = messages_of([CALL, {**RESULT, "output": output}], None)

    assert messages[-1]["content"] == "[input_image: this model reads text only]"


def test_what_an_unused_tool_did_is_left_out():
    assert messages_of([{"type": "web_search_call", "id": "1"}, HI], None) == [HI]


def test_a_function_in_a_namespace_has_both_names():
    (message,) = messages_of([{**CALL, "namespace": "eyes"}], None)

    assert message["tool_calls"][0]["function"]["name"] == "eyes__look"


WRONG = [
    ("hi", "input[0] is 'hi'"),
    ({"type": "item_reference", "id": "x"}, "send the item itself"),
    ({"type": "custom_tool_call"}, "declare a function tool"),
    ({"type": "dance"}, "input[0].type='dance' is not supported; expected one of"),
    ({"type": 5}, "input[0].type=5"),
    ({"role": "critic", "content": "x"}, "input[0].role is 'critic'"),
    ({"role": "user"}, "input[0].content is None"),
    ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0] is"),
    ({**CALL, "arguments": {}}, "input[0].arguments is {}"),
    ({**CALL, "call_id": None}, "input[0].call_id is None"),
    (RESULT, "input[0].call_id is '1'; expected that of a function_call before it"),
    ({**RESULT, "output": {}}, "input[0].output is {}"),
    (reasoning(content="x"), "input[0].content is 'x'"),
]


@pytest.mark.parametrize(("item", "message"), WRONG)
def test_a_wrong_item_is_named(item, message):
    with pytest.raises(RequestError) as raised:
        messages_of([item], None)

    assert message in str(raised.value)
    assert raised.value.param == "input"
