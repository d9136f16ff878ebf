"""Requests that leave their codec to the service: at the rules, and between real workers."""

from dataclasses import replace

from disagg.config import Config
from disagg.errors import TransferError
from disagg.router.actions import Reserve
from disagg.transfer.messages import Role, TokenEvent, WorkerInfo
from tests.router.rules import Rules
from tests.router.test_requests import GRANT, job, only
from tests.worker.pairs import paired

CODECS = ["fp8", "raw:dtype=fp16", "kivi:bits=4,group=64,residual=64"]
Sizes = dict[str, dict[int, int]]
SIZES = {"raw": {1024: 2048, 4096: 8192}, "fp8": {1024: 1124, 4096: 4196}}


def listed(wire_sizes: Sizes | None = None) -> Rules:
    """A prefill and a decode worker that list two codecs."""
    rules = Rules()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        info = WorkerInfo(name, role, name, 1, sizes=SIZES, wire_sizes=wire_sizes or {})
        rules.worker_up(info, 0.0)
    return rules


def test_a_request_keeps_its_codec_when_it_starts_again() -> None:
    rules = listed()
    learned = {
        "attention_error": {"raw": [{"0": 0.0}], "fp8": [{"0": 0.1}]},
        "link_bytes_per_s": 350.0,
    }
    rules.codec_policy.learn(learned, ("p", "d"))
    request = replace(job(tokens=300), codec="auto")
    (reserve,) = only(Reserve, rules.submit(request, 0.0))
    assert isinstance(reserve, Reserve)
    assert reserve.job.codec == "fp8", (
        "600 bytes of raw take 1.7 s; 1.6 s of 2 may be counted on"
    )
    rules.codec_policy.learn({"link_bytes_per_s": 1e9}, ("p", "d"))
    rules.on_grant("d", "r", 1, GRANT)
    rules.on_event("p", TokenEvent("r", 1, 0, error=TransferError("broken")), 0.5)
    (again,) = only(Reserve, rules.tick(1.0))
    assert isinstance(again, Reserve)
    assert (again.job.attempt, again.job.codec) == (2, "fp8")
    assert (
        rules.requests["r"].codec_reason,
        rules.codec_policy.chosen["fp8", "deadline"],
    ) == (
        "deadline",
        1,
    )


def test_who_names_no_codec_is_ahead_with_its_bytes() -> None:
    rules = listed()
    rules.submit(replace(job("default", tokens=1024), codec=""), 0.0)
    rules.submit(replace(job("spelled", tokens=1024), codec="raw:dtype=model"), 0.0)
    learned = {
        "attention_error": {"raw": [{"0": 0.0}], "fp8": [{"0": 0.1}]},
        "link_bytes_per_s": 2850.0,
    }
    rules.codec_policy.learn(learned, ("p", "d"))
    rules.submit(replace(job(tokens=300), codec="auto"), 0.0)
    assert rules.requests["r"].job.codec == "fp8", (
        "464 bytes cross in time behind the others"
    )
    assert rules.requests["r"].codec_reason == "deadline", "and 400 are sent"


def test_a_link_carries_what_is_sent_and_not_what_it_becomes() -> None:
    """States of a hybrid model are larger in the arena than on the link."""
    rules = listed({"raw": {1024: 1024, 4096: 4096}, "fp8": SIZES["fp8"]})
    learned = {
        "attention_error": {"raw": [{"0": 0.0}], "fp8": [{"0": 0.1}]},
        "link_bytes_per_s": 350.0,
    }
    rules.codec_policy.learn(learned, ("p", "d"))

    rules.submit(replace(job(tokens=300), codec="auto"), 0.0)

    assert rules.requests["r"].job.codec == "raw", "300 bytes are sent, of 560 in time"


async def test_the_most_accurate_is_taken_once_errors_are_known(runners, story):
    async with paired(runners, Config(codec="auto", codecs=CODECS)) as home:
        prompt, figures = (story * 2)[:300], []
        for begin, codec in enumerate(["auto", "auto", ""]):
            _, end = await home.complete(prompt[begin:], codec)
            figures.append(end.kv)
        assert [kv["codec"] for kv in figures] == ["fp8", "raw:dtype=fp16", "fp8"]
        assert [kv.get("choice") for kv in figures] == ["unmeasured", "accurate", None]
        assert set(figures[0]["attention_error"]) == set(CODECS)
        assert figures[0]["link_bytes_per_s"] > 0
