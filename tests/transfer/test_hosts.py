"""What a worker remembers of links, by host: rates, and failed direct connections."""

import logging

import pytest

from disagg.errors import PeerLostError
from disagg.transfer import hosts
from disagg.transfer.hosts import UNKNOWN_FRAME_BYTES, HostLink, HostLinks
from disagg.transfer.link import LinkReport, RateSample
from disagg.wire import FRAME_BYTES

HOUR_S = 3600.0
BLOCKED = PeerLostError("connection refused")


def report(gbytes_per_s: float, round_trip_ms: float = 1.0) -> LinkReport:
    return LinkReport("h:1", "gRPC over TCP", round_trip_ms, gbytes_per_s)


def sample(gbytes_per_s: float, seconds_per_frame: float) -> RateSample:
    seconds = 8 * seconds_per_frame
    return RateSample(8, int(gbytes_per_s * 1e9 * seconds), seconds)


def learn(link: HostLink, gbytes_per_s: float, seconds_per_frame: float) -> float:
    """The rate after frames that were answered at this one."""
    link.learn(report(gbytes_per_s), sample(gbytes_per_s, seconds_per_frame))
    assert link.report is not None
    return link.report.gbytes_per_s


# -- by host, for hours
def test_workers_of_one_host_share_its_link():
    links = HostLinks()

    assert links.to("h:1", 0.0) is links.to("h:2", 0.0)
    assert links.to("[::1]:1", 0.0) is not links.to("h:1", 0.0)


def test_a_report_is_remembered_for_hours():
    links = HostLinks()
    links.to("h:1", 0.0).report = report(1.0)

    assert links.to("h:2", 5 * HOUR_S).report == report(1.0)
    assert links.to("h:1", 12 * HOUR_S).report is None


def test_the_least_recently_used_hosts_are_forgotten(monkeypatch):
    monkeypatch.setattr(hosts, "MAX_HOSTS", 2)
    links = HostLinks()
    for host in ("a", "b", "a", "c"):
        links.to(f"{host}:1", 0.0).report = report(1.0)

    remembered = [links.to(f"{host}:1", 0.0).report for host in ("a", "c")]
    forgotten = links.to("b:1", 0.0).report

    assert remembered == [report(1.0)] * 2
    assert forgotten is None


# -- rates
def test_frames_over_an_unknown_link_are_small():
    link = HostLink("h")

    assert link.frame_bytes(FRAME_BYTES) == UNKNOWN_FRAME_BYTES
    assert link.frame_bytes(4000) == 4000


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (None, 2 * UNKNOWN_FRAME_BYTES),
        (report(125e-6), 100_000),
        (report(1.0), 800_000_000),
    ],
    ids=["unknown", "1 Mb/s", "8 Gb/s"],
)
def test_all_hand_offs_share_the_window_of_a_link(measured, expected):
    """Frames of twelve hand-offs over 1 Mb/s once delayed a ping by ten seconds."""
    link = HostLink("h")
    link.report = measured

    assert link.window_bytes(FRAME_BYTES) == expected


def test_the_first_frames_are_the_first_report():
    assert learn(HostLink("h"), 0.01, seconds_per_frame=0.001) == 0.01


def test_long_frames_show_the_rate_of_a_link():
    link = HostLink("h")
    link.report = report(1.0)

    assert learn(link, 0.5, seconds_per_frame=0.004) == 0.75


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.5, 1.0),
        (2.0, 2.0),
    ],
    ids=["no slower", "maybe faster"],
)
def test_short_frames_show_the_least_rate_of_a_link(rate, expected):
    link = HostLink("h")
    link.report = report(1.0)

    assert learn(link, rate, seconds_per_frame=0.001) == expected


def test_a_report_whose_frames_are_not_answered_in_time_is_dropped():
    link = HostLink("h")
    link.report = report(1.0)

    link.broke(quiet_s=0.5)
    assert link.report == report(1.0)

    link.broke(quiet_s=2.0)
    assert link.report is None


# -- direct connections
def test_two_failed_dials_in_a_row_are_too_many():
    link = HostLink("h")

    link.dial_failed(BLOCKED, 0.0)
    assert link.may_dial(0.0)

    link.dial_failed(BLOCKED, 0.0)
    assert not link.may_dial(0.0)


def test_a_dial_that_worked_counts_from_the_start():
    link = HostLink("h")

    link.dial_failed(BLOCKED, 0.0)
    link.dial_worked()
    link.dial_failed(BLOCKED, 0.0)

    assert link.may_dial(0.0)


def test_after_ten_minutes_one_dial_is_tried():
    link = HostLink("h")
    for _ in range(2):
        link.dial_failed(BLOCKED, 0.0)

    assert not link.may_dial(599.0)
    assert link.may_dial(600.0)
    link.dial_failed(BLOCKED, 600.0)
    assert not link.may_dial(1199.0)


def test_failed_dials_are_logged_once_until_one_works(caplog):
    caplog.set_level(logging.INFO)
    link = HostLink("h")

    for minute in range(0, 60, 10):
        link.dial_failed(BLOCKED, 60.0 * minute)
        link.dial_failed(BLOCKED, 60.0 * minute)
    link.dial_worked()

    failed, works = caplog.messages
    assert failed.startswith("direct connections to h fail (connection refused)")
    assert works == "direct connections to h work again"


def test_the_links_say_why_there_is_no_direct_connection():
    links = HostLinks()
    for _ in range(2):
        links.to("h:1", 0.0).dial_failed(BLOCKED, 0.0)
    links.to("unused:1", 0.0)

    (info,) = links.as_info()

    assert (info["peer"], info["direct_failed"]) == ("h", "connection refused")
