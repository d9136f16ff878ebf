"""The room of a worker of several ranks: a placement group of Ray with a bundle for each rank.

    front end     RankBundles.make ─► waits ─► placed: rank 0 starts in bundle 0
    rank 0        starts its followers in bundles 1, 2, ...
    at the end    whoever is left removes it, and with it all that runs in it

The group of a worker on a cluster outlives the front end, as the worker does. It has the worker's
name, so the next front end finds it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from disagg.config import ClusterConfig
from disagg.errors import CapacityError

STRATEGIES = {"pack": "STRICT_PACK", "spread": "SPREAD"}
INFEASIBLE_S = 20.0  # for hosts that are about to join
LEAST_CPU = 0.001  # of a bundle that needs nothing: Ray takes no empty one
LEAVE_S = 2.0
MAX_LISTED = 8  # hosts in a message


@dataclass
class RankBundles:
    """The placement group of one worker, as its front end holds it.

    cluster:   settings
    resources: of each rank
    now:       a clock in seconds
    """

    group: PlacementGroup
    cluster: ClusterConfig
    resources: Mapping[str, float]
    ranks: int
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._since = self.now()

    def waits_for(self) -> str:
        """What it asks for and what the hosts have, in words; "" while it has its place.

        It loses that with a host. CapacityError if no host, or no set of hosts, will ever have
        room. Hosts of pools may come.
        """
        entry: dict[str, Any] = placement_group_table(self.group)
        if entry.get("state", "REMOVED") == "REMOVED":
            raise CapacityError("its placement group was removed")
        if entry["state"] not in ("PENDING", "RESCHEDULING"):
            self._since = self.now()
            return ""
        words = lack(self.cluster, self.resources, self.ranks, alive_hosts())
        is_infeasible = entry["stats"]["scheduling_state"] == "INFEASIBLE"
        has_waited = self.now() >= self._since + INFEASIBLE_S
        if is_infeasible and has_waited and not self.cluster.pools:
            raise CapacityError(f"no room: {words}")
        return words

    def remove(self) -> None:
        """Free its resources; ends what runs in it."""
        with suppress(RayError):  # Ray itself is gone
            remove_placement_group(self.group)


def reserve(
    cluster: ClusterConfig,
    resources: Mapping[str, float],
    ranks: int,
    name: str,
    is_private: bool,
) -> RankBundles:
    """The placement group of a worker, which an earlier front end may have made.

    resources: of each rank
    """
    full_name = _full_name(cluster.name, name)
    resources = resources or {"CPU": LEAST_CPU}
    if is_private:
        group = _make(cluster, resources, ranks, full_name, lifetime=None)
        return RankBundles(group, cluster, resources, ranks)
    group = _groups(full_name).get(full_name) or _make(
        cluster, resources, ranks, full_name, lifetime="detached"
    )
    return RankBundles(group, cluster, resources, ranks)


def _make(
    cluster: ClusterConfig,
    resources: Mapping[str, float],
    ranks: int,
    name: str,
    lifetime: str | None,
) -> PlacementGroup:
    bundles = [dict(resources)] * ranks
    strategy = STRATEGIES[cluster.rank_placement]
    return placement_group(bundles, strategy, name, lifetime)


def _full_name(cluster_name: str, name: str) -> str:
    return f"disagg/{cluster_name}/{name}"


def _groups(prefix: str) -> dict[str, PlacementGroup]:
    """Those that were not removed, by name.

    Ray finds a group by name only in the namespace of the front end that made it.
    """
    return {
        entry["name"]: PlacementGroup(ray.PlacementGroupID.from_hex(key))
        for key, entry in placement_group_table().items()
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED"
    }


def in_bundle(group: PlacementGroup, rank: int) -> dict[str, object]:
    """Options of an actor that is this rank."""
    strategy = PlacementGroupSchedulingStrategy(group, rank)
    options = as_options(group.bundle_specs[rank])
    return {"scheduling_strategy": strategy, **options}


def as_options(resources: Mapping[str, float]) -> dict[str, object]:
    """Options of an actor that needs these resources of Ray."""
    others = dict(resources)
    return {
        "num_cpus": others.pop("CPU", 0),
        "num_gpus": others.pop("GPU", 0),
        "resources": others,
    }


def own_group() -> PlacementGroup:
    """The placement group of the worker whose process this is."""
    return ray.util.get_current_placement_group()


def leave() -> None:
    """Remove the placement group of this process, whose worker has ended.

    Returns after LEAVE_S at most, also without Ray's head.
    """
    removing = Thread(target=_remove_own, daemon=True)
    removing.start()
    removing.join(LEAVE_S)


def _remove_own() -> None:
    with suppress(RayError):  # Ray itself is gone
        remove_placement_group(own_group())


def alive_hosts() -> dict[str, dict[str, float]]:
    """Ray's resources of each host, by address."""
    return {
        node["NodeManagerAddress"]: node["Resources"]
        for node in ray.nodes()
        if node["Alive"]
    }


def lack(
    cluster: ClusterConfig,
    resources: Mapping[str, float],
    ranks: int,
    hosts: Mapping[str, Mapping[str, float]],
) -> str:
    """What a worker asks for beside what the hosts have: "2 ranks on one host, each with ..."."""
    where = "on one host" if cluster.rank_placement == "pack" else "on any hosts"
    parts = [
        f"{address} {_units({x: host.get(x, 0.0) for x in resources})}"
        for address, host in sorted(hosts.items())
    ]
    listed = "; ".join(parts[:MAX_LISTED])
    if len(parts) > MAX_LISTED:
        listed += f"; and {len(parts) - MAX_LISTED} more hosts"
    return (
        f"{ranks} ranks {where}, each with {_units(resources)}; "
        f"in all, used or free, the hosts have: {listed or 'nothing'}"
    )


def _units(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{units:.3g} {name}" for name, units in resources.items())


def remove_abandoned(cluster_name: str, workers: Sequence[str]) -> None:
    """Remove the placement groups of workers of this cluster name that are gone."""
    prefix = _full_name(cluster_name, "")
    for name, group in _groups(prefix).items():
        if name.removeprefix(prefix) not in workers:
            remove_placement_group(group)
