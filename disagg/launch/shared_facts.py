"""Facts that a front end leaves in Ray for the next one of the same cluster name."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray.experimental import internal_kv

from disagg.launch.ray_connection import lost_ray_is_an_error
from disagg.transfer.messages import Role
from disagg.transfer.security import Authority

AUTHORITY_KEY = b"disagg-authority"
COUNTS_KEY = b"disagg-counts"


class SharedFacts:
    """The secrets of a service and its number of workers, in Ray's key-value store.

    PeerLostError if Ray does not answer.
    """

    def __init__(self, cluster_name: str):
        self._namespace = cluster_name

    def authority(self, plane: str) -> Authority:
        """The service's secrets, created by its first front end.

        plane: "tls", or "token" for the token alone
        """
        stored = self._load(AUTHORITY_KEY)
        if stored is None:
            fresh = json.dumps(asdict(Authority.make()))
            self._store(AUTHORITY_KEY, fresh, overwrite=False)
            # of two front ends at once, the first one wins
            stored = self._load(AUTHORITY_KEY)
        authority = Authority(**json.loads(stored))
        if plane == "tls":
            return authority
        return Authority(authority.token)

    def load_counts(self) -> dict[Role, int] | None:
        """The last stored number of workers of each role; None if none was stored."""
        stored = self._load(COUNTS_KEY)
        if stored is None:
            return None
        return {Role(role): count for role, count in json.loads(stored).items()}

    def store_counts(self, counts: Mapping[Role, int]) -> None:
        self._store(COUNTS_KEY, json.dumps(dict(counts)))

    def _load(self, key: bytes) -> Any:
        with lost_ray_is_an_error():
            return internal_kv._internal_kv_get(key, namespace=self._namespace)

    def _store(self, key: bytes, value: str, overwrite: bool = True) -> None:
        with lost_ray_is_an_error():
            internal_kv._internal_kv_put(
                key, value, overwrite=overwrite, namespace=self._namespace
            )
