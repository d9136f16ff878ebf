"""The raw TCP socket that the data plane is compared with: the same bytes, memory to memory.

One connection, `sendall` of 2 MiB at a time from one arena, `recv_into` another; nothing is
checked.
"""

import contextlib
import socket
import struct
import threading

import numpy as np

FRAME_BYTES = 2 << 20
CONGESTION = "cubic"

_COUNT = struct.Struct("<Q")


class StreamServer:
    """Reads each connection into memory of its own and says the count when it ends."""

    def __init__(self, host: str, nbytes: int):
        self._memory = memoryview(np.full(nbytes, 0, np.uint8).data)
        self._socket = socket.create_server((host, 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listening socket was closed
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    connection.sendall(_COUNT.pack(self._read(connection)))

    def _read(self, connection: socket.socket) -> int:
        set_cubic(connection)
        total = 0
        while total < len(self._memory):
            count = connection.recv_into(self._memory[total : total + FRAME_BYTES])
            if not count:
                break
            total += count
        return total


def push_stream(host: str, port: int, data: memoryview) -> int:
    """Send bytes and wait until they have all been read; the count that the server says."""
    with socket.create_connection((host, port)) as connection:
        set_cubic(connection)
        for start in range(0, len(data), FRAME_BYTES):
            connection.sendall(data[start : start + FRAME_BYTES])
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(_COUNT.size, socket.MSG_WAITALL)
    (count,) = _COUNT.unpack(answer)
    return int(count)


def set_cubic(connection: socket.socket) -> None:
    """The same congestion control everywhere, whatever the host's default is."""
    with contextlib.suppress(OSError):  # a kernel without it has its own
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION.encode())
