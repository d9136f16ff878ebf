"""Placement groups of workers of several ranks, without Ray."""

from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from disagg.config import ClusterConfig
from disagg.errors import CapacityError
from disagg.launch import rank_bundles
from disagg.launch.rank_bundles import (
    INFEASIBLE_S,
    RankBundles,
    remove_abandoned,
    reserve,
)

GPU = {"CPU": 1.0, "GPU": 1.0}
HOSTS = {"10.0.0.2": {"CPU": 8.0, "GPU": 1.0}, "10.0.0.3": {"CPU": 8.0}}


class FakeRay:
    """Ray's placement groups, as a table. `made`: the arguments of each that was made."""

    def __init__(self) -> None:
        self.table: dict[str, dict[str, Any]] = {}
        self.made: list[tuple[Any, ...]] = []
        self.removed: list[Any] = []

    def add(self, key: str, name: str, state: str = "CREATED") -> None:
        self.table[key] = {"name": name, "state": state}

    def placement_group(self, *arguments: Any) -> Mock:
        self.made.append(arguments)
        return Mock()

    def placement_group_table(self, group: Any = None) -> Any:
        return self.table if group is None else self.table["own"]


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(rank_bundles, "placement_group", fake.placement_group)
    table = fake.placement_group_table
    monkeypatch.setattr(rank_bundles, "placement_group_table", table)
    monkeypatch.setattr(rank_bundles, "remove_placement_group", fake.removed.append)
    monkeypatch.setattr(rank_bundles, "PlacementGroup", lambda identity: identity)
    monkeypatch.setattr(ray, "PlacementGroupID", Mock(from_hex=lambda key: key))
    nodes = [
        {"NodeManagerAddress": address, "Alive": True, "Resources": resources}
        for address, resources in HOSTS.items()
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    return fake


def waiting(fake_ray: FakeRay, state: str, **settings: Any) -> RankBundles:
    """Two ranks that no hosts have room for yet. The clock stands at 0."""
    stats = {"scheduling_state": state}
    fake_ray.table["own"] = {"state": "PENDING", "stats": stats}
    cluster = ClusterConfig(**settings)
    return RankBundles(Mock(), cluster, GPU, ranks=2, now=lambda: 0.0)


@pytest.mark.parametrize(
    ("placement", "strategy"), [("pack", "STRICT_PACK"), ("spread", "SPREAD")]
)
def test_each_rank_has_a_bundle(fake_ray, placement, strategy):
    cluster = ClusterConfig(rank_placement=placement)

    reserve(cluster, GPU, 3, "prefill-0", is_private=True)

    assert fake_ray.made == [([GPU] * 3, strategy, "disagg/disagg/prefill-0", None)]


def test_ranks_without_resources_have_bundles_all_the_same(fake_ray):
    reserve(ClusterConfig(), {}, 2, "prefill-0", is_private=True)

    ((bundles, *_),) = fake_ray.made
    assert all(bundle["CPU"] > 0 for bundle in bundles)


def test_the_group_of_a_worker_outlives_its_front_end(fake_ray):
    reserve(ClusterConfig(), GPU, 2, "prefill-0", is_private=False)

    assert fake_ray.made[0][-1] == "detached"


def test_the_next_front_end_finds_the_group_of_a_worker(fake_ray):
    fake_ray.add("old", "disagg/disagg/prefill-0", "REMOVED")
    fake_ray.add("now", "disagg/disagg/prefill-0")
    fake_ray.add("another", "disagg/other/prefill-0")

    bundles = reserve(ClusterConfig(), GPU, 2, "prefill-0", is_private=False)

    assert bundles.group == "now"
    assert not fake_ray.made


def test_groups_of_workers_that_are_gone_are_removed(fake_ray):
    fake_ray.add("lives", "disagg/disagg/prefill-0")
    fake_ray.add("gone", "disagg/disagg/decode-0.3")
    fake_ray.add("another", "disagg/other/decode-0.3")
    fake_ray.add("foreign", "training")

    remove_abandoned("disagg", ["prefill-0"])

    assert fake_ray.removed == ["gone"]


def test_ranks_that_wait_say_what_they_need_and_what_hosts_have(fake_ray):
    bundles = waiting(fake_ray, "NO_RESOURCES")

    assert bundles.waits_for() == (
        "2 ranks on one host, each with 1 CPU, 1 GPU; in all, used or free, the hosts "
        "have: 10.0.0.2 8 CPU, 1 GPU; 10.0.0.3 8 CPU, 0 GPU"
    )


def test_ranks_that_have_their_place_wait_for_nothing(fake_ray):
    bundles = waiting(fake_ray, "NO_RESOURCES")
    fake_ray.table["own"] = {"state": "CREATED"}

    assert bundles.waits_for() == ""


def test_ranks_that_no_host_can_take_give_up(fake_ray):
    bundles = waiting(fake_ray, "INFEASIBLE")
    assert bundles.waits_for()
    bundles.now = lambda: INFEASIBLE_S

    with pytest.raises(CapacityError, match="no room: 2 ranks on one host"):
        bundles.waits_for()


@pytest.mark.parametrize(
    ("state", "pools"), [("INFEASIBLE", True), ("NO_RESOURCES", False)]
)
def test_ranks_wait_where_room_may_come(fake_ray, state, pools):
    """An autoscaler starts hosts of pools, and other workers end."""
    bundles = waiting(fake_ray, state, pools=pools)
    bundles.now = lambda: 1000.0

    assert bundles.waits_for()


def test_hosts_beyond_a_screen_are_counted(fake_ray, monkeypatch):
    node = {"Alive": True, "Resources": {"CPU": 1.0}}
    nodes = [{**node, "NodeManagerAddress": f"h{i}"} for i in range(20)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)

    words = waiting(fake_ray, "NO_RESOURCES", rank_placement="spread").waits_for()

    assert words.startswith("2 ranks on any hosts")
    assert words.endswith("and 12 more hosts")


def test_ranks_that_lose_a_host_while_they_start_wait_again(fake_ray):
    """Rank 0 waits for a follower that Ray cannot place any more."""
    bundles = waiting(fake_ray, "INFEASIBLE")
    own = fake_ray.table["own"]
    own["state"] = "CREATED"
    bundles.now = lambda: 1000.0
    assert not bundles.waits_for()

    own["state"] = "RESCHEDULING"
    assert bundles.waits_for()

    bundles.now = lambda: 1000.0 + INFEASIBLE_S
    with pytest.raises(CapacityError, match="no room"):
        bundles.waits_for()


@pytest.mark.parametrize("entry", [{"state": "REMOVED"}, {}], ids=["removed", "lost"])
def test_ranks_whose_group_is_gone_wait_no_longer(fake_ray, entry):
    bundles = waiting(fake_ray, "NO_RESOURCES")
    fake_ray.table["own"] = entry

    with pytest.raises(CapacityError, match="was removed"):
        bundles.waits_for()


def test_a_process_that_ends_does_not_wait_for_a_ray_that_is_gone(monkeypatch):
    never = Event()
    monkeypatch.setattr(rank_bundles, "_remove_own", never.wait)
    monkeypatch.setattr(rank_bundles, "LEAVE_S", 0.01)

    rank_bundles.leave()

    assert not never.is_set()
    never.set()
