"""The instance metadata service of all simulated machines, which also carries out their fake root commands.

One server on 127.0.0.1. The first part of a path is the instance that asks: http://127.0.0.1:PORT/i-0123456789abcdef0.
Like our machines, it requires version 2 of the service: a PUT gives a token, and each GET must present it (AWS, "Use
the Instance Metadata Service").
"""

import http.server
import secrets
import threading
from collections.abc import Callable
from typing import Any

TOKEN_HEADER = "X-aws-ec2-metadata-token"


class MetadataService:
    """The service.

    `get_texts(id)` returns the metadata of an instance: texts by paths such as /latest/meta-data/instance-id, None when
    no such instance runs. `run_root_command(id, words)` carries out a root command of an instance and returns its
    output. `requested` are the paths of all GETs so far. With `garbage` they are answered by these bytes.
    """

    def __init__(
        self,
        get_texts: Callable[[str], dict[str, str] | None],
        run_root_command: Callable[[str, list[str]], str] = lambda *_: "",
    ) -> None:
        self.get_texts = get_texts
        self.run_root_command = run_root_command
        self.tokens: set[tuple[str, str]] = set()  # (instance, token)
        self.requested: list[str] = []
        self.garbage = b""
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"service": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def url(self, instance_id: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{instance_id}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Print nothing: the machine that asked has just been killed."""


class _Handler(http.server.BaseHTTPRequestHandler):
    service: MetadataService

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _split_path(self) -> tuple[str, str]:
        instance_id, slash, path = self.path.lstrip("/").partition("/")
        return instance_id, slash + path

    def do_PUT(self) -> None:
        instance_id, path = self._split_path()
        lifetime_seconds = self.headers[f"{TOKEN_HEADER}-ttl-seconds"] or ""
        if path != "/latest/api/token" or self.service.get_texts(instance_id) is None:
            return self._answer(404)
        if not lifetime_seconds.isdigit() or not 1 <= int(lifetime_seconds) <= 21600:
            return self._answer(400)
        token = secrets.token_urlsafe(16)
        self.service.tokens.add((instance_id, token))
        return self._answer(200, token)

    def do_GET(self) -> None:
        instance_id, path = self._split_path()
        self.service.requested.append(path)
        texts = self.service.get_texts(instance_id) or {}
        if self.service.garbage:
            self.wfile.write(self.service.garbage)
        elif (instance_id, self.headers[TOKEN_HEADER] or "") not in self.service.tokens:
            self._answer(401)
        else:
            self._answer(200, texts[path]) if path in texts else self._answer(404)

    def do_POST(self) -> None:
        instance_id, path = self._split_path()
        if self.service.get_texts(instance_id) is None:
            return self._answer(404, "no such machine\n")
        try:
            return self._answer(200, self.service.run_root_command(instance_id, path.split("/")[1:]))
        except (RuntimeError, TimeoutError, ValueError) as error:
            return self._answer(500, f"{error}\n")
