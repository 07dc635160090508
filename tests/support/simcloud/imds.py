"""The instance metadata service of all simulated machines, and what their fakes of root's commands ask for.

One server on 127.0.0.1; the first word of a path says which machine asks: http://127.0.0.1:PORT/i-0123456789abcdef0.
It is version 2 alone, as our machines require: a token by PUT first (AWS, "Use the Instance Metadata Service").
"""

import http.server
import secrets
import threading
from collections.abc import Callable
from typing import Any

HEADER = "X-aws-ec2-metadata-token"


class Metadata:
    """The service. `tell(id)` gives what an instance may know, None when none such runs; `obey(id, words)` does what
    root asked for and gives the answer.
    """

    def __init__(self, tell: Callable[[str], dict[str, str] | None], obey: Callable[[str, list[str]], str]) -> None:
        self.tell, self.obey = tell, obey
        self.tokens: set[tuple[str, str]] = set()
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def url(self, instance: str) -> str:
        """The address that an instance asks."""
        return f"http://127.0.0.1:{self._server.server_port}/{instance}"

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Whoever asked has just been killed."""


class _Handler(http.server.BaseHTTPRequestHandler):
    service: Metadata

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def _answer(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _asked(self) -> tuple[str, str]:
        instance, _, path = self.path.lstrip("/").partition("/")
        return instance, path

    def do_PUT(self) -> None:
        instance, path = self._asked()
        seconds = self.headers[f"{HEADER}-ttl-seconds"] or ""
        if path != "latest/api/token" or self.service.tell(instance) is None:
            return self._answer(404)
        if not seconds.isdigit() or not 1 <= int(seconds) <= 21600:
            return self._answer(400)
        token = secrets.token_urlsafe(16)
        self.service.tokens.add((instance, token))
        return self._answer(200, token)

    def do_GET(self) -> None:
        instance, path = self._asked()
        if (instance, self.headers[HEADER] or "") not in self.service.tokens:
            return self._answer(401)
        said = self.service.tell(instance) or {}
        key = path.removeprefix("latest/").removeprefix("meta-data/")
        return self._answer(200, said[key]) if path.startswith("latest/") and key in said else self._answer(404)

    def do_POST(self) -> None:
        instance, path = self._asked()
        if not path.startswith("machine/") or self.service.tell(instance) is None:
            return self._answer(404, "no such machine\n")
        try:
            return self._answer(200, self.service.obey(instance, path.split("/")[1:]))
        except (TimeoutError, RuntimeError) as error:
            return self._answer(500, f"{error}\n")
