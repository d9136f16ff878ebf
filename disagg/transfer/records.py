"""Stands in for the file of this name until it is there."""

from disagg.transfer.items import KIND_ORDER, ArenaSource, Checklist, items_in_frame, message_bytes
from disagg.transfer.units import Unit, content_keys, units_of

__all__ = ["KIND_ORDER", "ArenaSource", "Checklist", "Unit", "content_keys", "items_in_frame"]
__all__ += ["message_bytes", "units_of"]
