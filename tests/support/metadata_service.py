"""An instance metadata service, version 2, for agents and watchdogs of tests."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest


class Metadata(http.server.BaseHTTPRequestHandler):
    """A token by PUT, then the entries of `texts`, else 404."""

    texts: dict[str, str]
    requested: list[str]
    tokens: list[str]
    garbage: bytes

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        if self.path != "/latest/api/token" or not self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
            return self.answer(400, "")
        self.tokens.append(f"token-{len(self.tokens)}")
        return self.answer(200, self.tokens[-1])

    def do_GET(self) -> None:
        self.requested.append(self.path)
        if self.garbage:
            self.wfile.write(self.garbage)
            return None
        if self.headers["X-aws-ec2-metadata-token"] != self.tokens[-1]:
            return self.answer(401, "")
        return self.answer(200, self.texts[self.path]) if self.path in self.texts else self.answer(404, "not found")


@pytest.fixture
def service() -> Iterator[Any]:
    """A metadata service for this test alone, on this machine: `service.texts[path] = text`."""
    handler = type("Handler", (Metadata,), {"texts": {}, "requested": [], "tokens": [], "garbage": b""})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    handler.address = f"http://127.0.0.1:{server.server_port}/"  # type: ignore[attr-defined]
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()
