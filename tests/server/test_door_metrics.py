"""Series of several doors in one text: none is lost, none is counted twice."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from disagg.server.door_metrics import KEEP_S, DoorSeries, exported, rendered


def counting(requests: int) -> CollectorRegistry:
    """What a door has counted."""
    registry = CollectorRegistry()
    Counter("requests", "Requests", ["kind"], registry=registry).labels("a").inc(
        requests
    )
    Gauge("unused", "Without a value", ["kind"], registry=registry)
    return registry


def series(text: bytes) -> set[str]:
    lines = text.decode().splitlines()
    return {line for line in lines if line[0] != "#" and "_created" not in line}


def test_every_door_has_a_series_of_its_own():
    doors = {"0": exported(counting(2)), "1": exported(counting(5))}

    text = rendered(CollectorRegistry(), doors)

    assert series(text) == {
        'requests_total{door="0",kind="a"} 2.0',
        'requests_total{door="1",kind="a"} 5.0',
    }


def test_series_that_no_door_has_are_those_of_the_router():
    registry = counting(0)
    Gauge("workers", "Workers", registry=registry).set(3)

    text = rendered(registry, {"0": exported(counting(2))})

    assert series(text) == {'requests_total{door="0",kind="a"} 2.0', "workers 3.0"}


def test_a_family_is_announced_once():
    doors = {name: exported(counting(1)) for name in ("0", "1", "2")}

    text = rendered(CollectorRegistry(), doors).decode()

    assert text.count("# TYPE requests_total counter") == 1


def test_the_series_of_a_door_that_left_stay_for_a_while_and_then_end():
    now = 0.0
    series = DoorSeries(clock=lambda: now)
    series.replace("a", b"1")
    series.replace("b", b"2")

    series.leave("a")
    now = KEEP_S - 1
    before = series.current()
    now = KEEP_S

    assert before == {"a": b"1", "b": b"2"}
    assert series.current() == {"b": b"2"}


def test_the_series_of_a_door_that_came_back_stay():
    now = 0.0
    series = DoorSeries(clock=lambda: now)
    series.replace("0", b"1")
    series.leave("0")
    series.replace("0", b"0")

    now = 2 * KEEP_S

    assert series.current() == {"0": b"0"}
