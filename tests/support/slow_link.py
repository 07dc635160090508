"""A slow network link for tests: a TCP proxy that passes on what a server sends at a limited rate."""

import contextlib
import socket
import threading
import time
from typing import Self

PIECE_BYTES = 8192
BUFFER_BYTES = 65536  # of each socket: what waits in larger ones would hide the rate


class SlowLink:
    """A link to a server, as a context. Clients connect to `address` and `port`.

    All connections share `bytes_per_second`, from the server to the clients.
    """

    address = "127.0.0.1"

    def __init__(self, server: tuple[str, int], bytes_per_second: float) -> None:
        self.server = server
        self.bytes_per_second = bytes_per_second
        self.free_at = 0.0
        self.lock = threading.Lock()
        self.sockets: list[socket.socket] = []
        self.listener = socket.create_server((self.address, 0))
        self.port: int = self.listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for connection in [self.listener, *self.sockets]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.socket()
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                server.connect(self.server)
                self.sockets += [client, server]
                for source, target, is_slow in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._carry, args=(source, target, is_slow), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if is_slow:
                    self._wait_for(len(data))
                target.sendall(data)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _wait_for(self, size: int) -> None:
        with self.lock:
            self.free_at = max(self.free_at, time.monotonic()) + size / self.bytes_per_second
            seconds = self.free_at - time.monotonic()
        time.sleep(max(0.0, seconds))
