"""The links of a worker to decode workers, each measured when it is made. Lives on the io loop."""

import asyncio
import logging
from dataclasses import asdict
from typing import Any

from disagg.errors import DisaggError
from disagg.transfer.channel import Link, connect
from disagg.transfer.probe import LinkReport, measure
from disagg.transfer.security import Security

log = logging.getLogger(__name__)


class Links:
    """Links by address; `reports` says what was measured."""

    def __init__(self, security: Security | None):
        self.reports: dict[str, LinkReport] = {}
        self._security = security
        self._links: dict[str, Link] = {}
        self._measuring: dict[str, asyncio.Task[None]] = {}

    def get(self, address: str) -> Link:
        """The link to an address, a new one if there is none."""
        if address not in self._links:
            self._links[address] = connect(address, self._security)
            self._measuring[address] = asyncio.create_task(self._measure(self._links[address]))
        return self._links[address]

    async def meet(self, addresses: list[str]) -> list[str]:
        """Make links before they are needed; what each can do, in words."""
        for address in addresses:
            self.get(address)
        for address in addresses:
            await asyncio.wait([self._measuring[address]])
        return [str(self.reports[address]) for address in addresses if address in self.reports]

    def as_info(self) -> list[dict[str, Any]]:
        """What was measured, as plain values."""
        return [asdict(report) for report in self.reports.values()]

    async def close(self) -> None:
        """End every call on every link."""
        for task in self._measuring.values():
            task.cancel()
        for link in self._links.values():
            await link.close()

    async def _measure(self, link: Link) -> None:
        try:
            report = self.reports[link.address] = await measure(link)
            log.info("%s", report)
        except DisaggError as error:
            log.warning("the link to %s cannot be measured: %s", link.address, error)
