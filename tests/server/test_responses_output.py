"""Parts of an answer become output items, and events that tell of them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.parsers.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Thought,
)
from disagg.server.output_text import joined_parts
from disagg.server.responses_input import unsealed
from disagg.server.responses_output import MAX_BLANK, OutputWriter

NAMESPACES = {"eyes__look": ("eyes", "look")}
CALL = [CallBegin(0, "look"), CallArguments(0, '{"at": 2}'), CallEnd(0)]


def written(
    parts: list[Part], is_cut: bool = False, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events and the items of an answer."""
    writer = OutputWriter(lambda: "call_1", NAMESPACES, **options)
    events = [event for part in parts for event in writer.add(part)]
    events += writer.finish(is_cut)
    texts = [event.text(number) for number, event in enumerate(events)]
    return [data_of(text) for text in texts], json.loads(writer.items)


def data_of(text: str) -> dict[str, Any]:
    """The data of an event, whose name is also its type."""
    name, data, *rest = text.split("\n")
    assert rest == ["", ""]
    body = json.loads(data.removeprefix("data: "))
    assert name == f"event: {body['type']}"
    return body


def items_of(parts: list[Part], **options: Any) -> list[dict[str, Any]]:
    """The items of an answer, without the ids."""
    _, items = written(parts, **options)
    return [without_id(item) for item in items]


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    fields = {"type": "message", "status": status, "role": "assistant"}
    return {**fields, "content": [part]}


def reasoning(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "status": status, "summary": [], "content": [part]}


def call(arguments: str, status: str = "completed", **fields: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "status": status,
        "call_id": "call_1",
        "name": "look",
        "arguments": arguments,
        **fields,
    }


def test_each_kind_of_part_is_an_item():
    items = items_of([Thought("Hm."), Content("I look."), *CALL])

    assert items == [reasoning("Hm."), message("I look."), call('{"at": 2}')]


def test_the_events_of_an_item_are_those_of_the_specification():
    events, _ = written([Thought("Hm."), *CALL])

    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]


def test_the_last_item_of_a_cut_answer_is_incomplete():
    items = items_of([Thought("Hm."), Content("Ra")], is_cut=True)

    assert items == [reasoning("Hm."), message("Ra", "incomplete")]


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_call_that_does_not_end_is_incomplete(is_cut):
    assert items_of(CALL[:-1], is_cut=is_cut) == [call('{"at": 2}', "incomplete")]


def test_a_function_in_a_namespace_has_its_own_name():
    items = items_of([CallBegin(0, "eyes__look"), CallEnd(0)])

    assert items == [call("", namespace="eyes")]


def test_white_space_between_items_is_no_message():
    items = items_of([Thought("Hm."), Content("\n"), Content("\n"), *CALL])

    assert items == [reasoning("Hm."), call('{"at": 2}')]


def test_white_space_before_a_text_is_part_of_it():
    assert items_of([Content("\n"), Content(" Rain.\n")]) == [message("\n Rain.\n")]


def test_much_white_space_is_a_message():
    """Clients see that a model repeats it."""
    text = "\n" * (MAX_BLANK + 1)

    assert items_of([Content(text), *CALL])[0] == message(text)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_answer_without_items_has_a_message(text):
    assert items_of([Content(text)] if text else []) == [message(text)]


def test_thoughts_are_sealed_where_a_client_sends_them_back():
    (item,) = items_of([Thought("Hm")], seals_thoughts=True)

    assert unsealed(item["encrypted_content"]) == "Hm"


TEXTS = st.lists(st.text("a \n{é", min_size=1, max_size=4), min_size=1, max_size=4)


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    """Parts as a parser writes them: texts in random pieces."""
    parts: list[Part] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from("tcf"), max_size=6)):
        texts = draw(TEXTS)
        if kind == "t":
            parts += [Thought(text) for text in texts]
        elif kind == "c":
            parts += [Content(text) for text in texts]
        else:
            parts.append(CallBegin(num_calls, "look"))
            parts += [CallArguments(num_calls, text) for text in texts]
            parts.append(CallEnd(num_calls))
            num_calls += 1
    return parts[: draw(st.integers(0, len(parts)))]


def accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client knows from deltas alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        else:
            item = items[event["output_index"]]
            assert item is items[-1]
            advance(item, event)
    return items


def advance(item: dict[str, Any], event: dict[str, Any]) -> None:
    """Add a delta to an item, or compare the item with what an event says of it."""
    match event:
        case {"type": "response.output_item.done"}:
            item["status"] = event["item"]["status"]
            assert item == event["item"]
        case {"type": "response.content_part.added"}:
            item["content"].append(event["part"])
        case {"type": "response.content_part.done"}:
            assert item["content"] == [event["part"]]
        case {"type": "response.function_call_arguments.delta"}:
            item["arguments"] += event["delta"]
        case {"type": "response.function_call_arguments.done"}:
            assert item["arguments"] == event["arguments"]
        case {"delta": text}:
            item["content"][0]["text"] += text
        case {"text": text}:
            assert item["content"][0]["text"] == text


@settings(max_examples=60)
@given(answers(), st.booleans())
def test_the_events_add_up_to_the_items(parts, is_cut):
    events, items = written(parts, is_cut)

    assert accumulated(events) == items
    numbers = [event["sequence_number"] for event in events]
    assert numbers == [*range(len(events))]


@settings(max_examples=60)
@given(answers(), st.booleans())
def test_the_items_do_not_depend_on_the_pieces(parts, is_cut):
    assert items_of(parts, is_cut=is_cut) == items_of(
        joined_parts(parts), is_cut=is_cut
    )
