"""Plans which workers load, leave or change their role to reach a count per role. No Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.transfer.messages import Role

if TYPE_CHECKING:
    from disagg.launch.actors import Actor


@dataclass
class ScalingPlan:
    """The steps from the current workers to the target counts."""

    role_changes: "list[tuple[Actor, Role]]" = field(default_factory=list)
    loads: list[Role] = field(default_factory=list)
    leaving: "list[Actor]" = field(default_factory=list)


def plan_scaling(
    actors: "Sequence[Actor]", counts: Mapping[Role, int], may_change_role: bool
) -> ScalingPlan:
    """Let surplus workers that serve take a role that lacks one; load the rest, or let them leave.

    may_change_role: False where each role has hosts of its own
    """
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
