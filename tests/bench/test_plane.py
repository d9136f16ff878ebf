"""`disagg bench transfer --plane`, at sizes that say nothing of speed."""

import json

from disagg.bench.inputs import shape_of
from disagg.bench.plane import PLANE
from disagg.codecs.planning import parse_plan
from disagg.transfer.records import Manifest

SHAPE = shape_of(3, 2, 64)
COMMAND = (
    "bench transfer --plane --no-netns --layers 3 --heads 2 --head-dim 64 "
    "--tokens 333 --rounds 2 --out"
)


def test_every_channel_and_the_socket_move_all_records(disagg, tmp_path):
    file = tmp_path / "a.json"

    table = disagg(COMMAND, file).out

    assert [line.split()[0] for line in table.splitlines()[1:]] == ["loopback"] * 4
    rows = json.loads(file.read_text())["rows"]
    assert [(row["channel"], row["tls"]) for row in rows] == [
        ("grpc", False),
        ("direct", False),
        ("grpc", True),
        ("direct", True),
    ]
    nbytes = Manifest(parse_plan(PLANE.codecs[0], SHAPE), 333).total_bytes
    for row in rows:
        assert (row["link"], row["rounds"], row["nbytes"]) == ("loopback", 2, nbytes)
        assert min(row["plane_gbps"], row["tcp_gbps"], row["ratio"]) > 0
        assert min(*row["plane_cpu"].values(), *row["tcp_cpu"].values()) > 0
