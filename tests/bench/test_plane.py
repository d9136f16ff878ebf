import json
from dataclasses import asdict

import pytest

from disagg.bench.inputs import shape_of
from disagg.bench.plane import PlaneOptions, draw, measure
from disagg.codecs.describe import stored_bytes
from disagg.codecs.planning import parse_plan

SHAPE = shape_of(3, 2, 64)


@pytest.fixture(scope="module")
def row():
    (found,) = measure(PlaneOptions(tokens=333, rounds=3, shape=SHAPE))
    return found


def test_plane_tls_and_socket_bring_the_records_of_one_prompt(row):
    group = parse_plan(PlaneOptions.codec, SHAPE).groups[0]
    assert (row.link, row.rounds) == ("loopback", 3)
    assert row.nbytes == 3 * stored_bytes(group, 333)
    for way in (row.plane_gbps, row.tls_gbps, row.tcp_gbps, row.ratio, row.tls_ratio):
        assert way > 0
    for cost in (row.plane_cpu, row.tls_cpu):
        assert cost.sender > 0
        assert cost.receiver > 0


def test_json_has_the_promised_keys_and_the_table_a_line(row):
    assert {"plane_gbps", "tcp_gbps", "ratio"} <= json.loads(json.dumps(asdict(row))).keys()
    assert draw({"rows": [asdict(row)]}).splitlines()[-1].startswith("loopback")
