"""Names of workers: role, place and, of a replacement, a number that makes the name new.

    prefill-0  decode-0  decode-1.3

Ray and the router know a worker by its name, so the name of a dead worker is not used again.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import count, islice

from disagg.transfer.messages import Role


class WorkerNames:
    """Names for the first workers of a service, and for their replacements.

    adopted: workers that an earlier front end started
    """

    def __init__(self, adopted: Sequence[str] = ()):
        self.adopted = sorted(adopted)
        self._last_number = max(map(number_of, adopted), default=0)

    def initial(self, counts: Mapping[Role, int]) -> list[tuple[Role, str]]:
        """The adopted workers, and new names up to the count of each role."""
        names: list[tuple[Role, str]] = []
        for role, number in counts.items():
            for name in self._of_role(role, number):
                names.append((role, name))
        return names

    def _of_role(self, role: Role, number: int) -> list[str]:
        adopted = [name for name in self.adopted if name.startswith(f"{role}-")]
        names = list(adopted)
        for i in range(number):
            name = f"{role}-{i}"
            if len(names) < number and name not in adopted:
                names.append(name)
        return names

    def free_places(
        self, role: Role, names_in_use: Collection[str], number: int
    ) -> list[str]:
        """The first places of a role that no worker has."""
        places_in_use = {place_of(name) for name in names_in_use}
        places = (f"{role}-{i}" for i in count())
        free = (place for place in places if place not in places_in_use)
        return list(islice(free, number))

    def replacement(self, place: str) -> str:
        """A new name at a place."""
        self._last_number += 1
        return f"{place}.{self._last_number}"


def place_of(name: str) -> str:
    """The part of a name that a worker shares with its replacement: "decode-1" of "decode-1.3"."""
    return name.partition(".")[0]


def number_of(name: str) -> int:
    """The number of a replacement: 3 of "decode-1.3"; 0 of a first worker."""
    return int(name.partition(".")[2] or 0)
