"""A webhook server on 127.0.0.1. It records what is posted, and gives the answers that the test has set."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET_PATH = "/services/T000/B000/s3cr3t"


class WebhookServer:
    """`posted` are the JSON objects that came. `status` is the answer; 0: it never answers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}{SECRET_PATH}"
        self.label = f"http://127.0.0.1:{port}/..."
        self.posted: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = 200

    @property
    def events(self) -> list[str]:
        return [notification["event"] for notification in self.posted]


@contextlib.contextmanager
def webhook_server() -> Iterator[WebhookServer]:
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            webhook.paths.append(self.path)
            webhook.posted.append(json.loads(content))
            while not webhook.status and not is_over.is_set():
                time.sleep(0.02)
            with contextlib.suppress(OSError):
                self.send_response(webhook.status or 200)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    webhook = WebhookServer(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield webhook
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
