"""Which workers change their role, load or leave, so that each role has its count. No Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.transfer.messages import Role

if TYPE_CHECKING:
    from disagg.launch.ray_cluster import Actor


@dataclass
class ScalingPlan:
    """Steps from the workers of now to the counts that were asked for."""

    role_changes: "list[tuple[Actor, Role]]" = field(default_factory=list)
    loads: list[Role] = field(default_factory=list)
    leaving: "list[Actor]" = field(default_factory=list)


def plan_scaling(
    actors: "Sequence[Actor]", counts: Mapping[Role, int], may_change_role: bool
) -> ScalingPlan:
    """A surplus worker takes a role that lacks one, if it serves already; others load or leave."""
    plan = ScalingPlan()
    staying = {
        role: [x for x in actors if x.role is role and not x.leaves] for role in counts
    }
    for role, count in counts.items():
        plan.leaving += staying[role][count:]
    changeable = [x for x in plan.leaving if x.info and may_change_role]
    for role, count in counts.items():
        for _ in range(count - len(staying[role])):
            if changeable:
                actor = changeable.pop(0)
                plan.role_changes.append((actor, role))
                plan.leaving.remove(actor)
            else:
                plan.loads.append(role)
    return plan
