"""The slots of the decode batch, counted across threads."""

from threading import Lock


class DecodeSlots:
    """Slots in the decode batch. A sequence holds one while it decodes, and from the moment that
    its hand-off was promised room. Any thread may call.

    count: slots in all · free: slots not taken
    """

    def __init__(self, count: int):
        self.count = count
        self.free = count
        self._lock = Lock()

    def take(self) -> bool:
        """Take a slot; False if none is free."""
        with self._lock:
            if self.free <= 0:
                return False
            self.free -= 1
            return True

    def give(self) -> None:
        """Return a slot."""
        with self._lock:
            self.free += 1
