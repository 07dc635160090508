"""The HTTP server of the simulated cloud: it counts calls, injects faults, and takes control commands.

A control command is POST /_sim/NAME with JSON, answered by JSON. NAME is a method or an attribute of the front, of the
cloud or of its machines.
"""

import contextlib
import io
import json
import socket
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from support.simcloud.aws_protocol import error_response, parse_action
from support.simcloud.cloud import SimulatedAws
from support.simcloud.peer import kill, peer_pids
from support.simcloud.services import TARGETS, ServiceError
from werkzeug.serving import ThreadedWSGIServer

Response = tuple[str, list[tuple[str, str]], bytes]  # status line, headers, body


@dataclass
class Fault:
    """A fault at calls of an action (and a service): after `skip` such calls, at `times` of them.

    With `code` the answer is that error. With `drop` the connection ends without an answer. With `kill` the process
    that calls is killed. With none of them, the call is done after `delay` seconds. `after`: the call is done first,
    and its answer is lost.
    """

    action: str = ""
    service: str = ""
    code: str = ""
    message: str = "injected"
    status: int | None = None
    times: int = 1
    skip: int = 0
    after: bool = False
    drop: bool = False
    kill: bool = False
    delay: float = 0.0

    def strikes(self, service: str, action: str) -> bool:
        """Return whether the fault strikes this call, and count it."""
        if self.action not in ("", action) or self.service not in ("", service) or self.times < 1:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


@dataclass
class AwsFrontend:
    """The WSGI application. `calls` are (service, action) in order, without control commands."""

    sim: SimulatedAws
    calls: list[tuple[str, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)  # killed processes

    def __post_init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.Lock()

    def reset(self) -> None:
        with self.lock:
            self.calls, self.faults, self.killed = [], [], []
        self.sim.reset()

    def forget_past(self) -> None:
        """Forget all calls so far, and the bill of all resources so far, which is never written."""
        self.calls.clear()
        self.sim.meter.lines.clear()

    def count(self, action: str = "") -> Any:
        """Return how often an action was called; without an argument, the counts of all actions."""
        counts = Counter(name for _, name in self.calls)
        return counts[action] if action else dict(counts)

    def fault(self, **settings: Any) -> Fault:
        fault = Fault(**settings)
        with self.lock:
            self.faults.append(fault)
        return fault

    def no_faults(self) -> None:
        self.faults.clear()

    def set(self, **settings: Any) -> None:
        """Set attributes of the simulated cloud. Raises `AttributeError` for an unknown name."""
        for name, value in settings.items():
            getattr(self.sim, name)
            setattr(self.sim, name, value)

    # --- calls -----------------------------------------------------------------------------------------------------

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        if environ["PATH_INFO"].startswith("/_sim/"):
            status, headers, content = self.run_control_command(environ["PATH_INFO"].removeprefix("/_sim/"), body)
        else:
            status, headers, content = self.handle_call(environ, body)
        start_response(status, headers)
        return [content]

    def handle_call(self, environ: dict[str, Any], body: bytes) -> Response:
        """Answer one API call, with its fault. Raises `ConnectionError` when there is no answer."""
        service, region, action = parse_action(environ, body)
        with self.lock:
            self.calls.append((service, action))
            fault = next((fault for fault in self.faults if fault.strikes(service, action)), None)
        if fault is None:
            return self.do(environ, body, service, region)
        time.sleep(fault.delay)
        loses_answer = fault.kill or fault.drop or fault.code
        if fault.after or not loses_answer:
            response = self.do(environ, body, service, region)
            if not loses_answer:
                return response
        if fault.kill:
            pids = peer_pids(environ["REMOTE_ADDR"], int(environ["REMOTE_PORT"]), int(environ["SERVER_PORT"]))
            self.killed += pids
            kill(pids)
        if fault.kill or fault.drop:
            with contextlib.suppress(OSError):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("the answer is lost, as requested")
        return error_response(service, fault.code, fault.message, fault.status)

    def do(self, environ: dict[str, Any], body: bytes, service: str, region: str) -> Response:
        """Let moto do the call, or one of the services that moto does not have."""
        target = TARGETS.get(environ.get("HTTP_X_AMZ_TARGET", ""))
        if target is not None:
            try:
                with self.sim.lock:
                    text = json.dumps(target(self.sim, region, json.loads(body or b"{}"))).encode()
            except ServiceError as error:
                return error_response(service, error.code, error.message, error.status)
            return "200 OK", [("Content-Type", "application/x-amz-json-1.1"), ("Content-Length", str(len(text)))], text
        if service in ("pricing", "servicequotas"):
            return error_response(service, "NotImplemented", "not in the simulated cloud", 501)
        starts: list[Any] = []
        chunks = self.app({**environ, "wsgi.input": io.BytesIO(body)}, lambda *start: starts.append(start[:2]))
        content = b"".join(chunks)
        status, headers = starts[0]
        return status, [header for header in headers if header[0].lower() != "connection"], content

    # --- control ---------------------------------------------------------------------------------------------------

    def run_control_command(self, command: str, body: bytes) -> Response:
        """Run a control command. Returns its answer, or {"error": line} with status 400."""
        try:
            owners = (self, self.sim, self.sim.machines)
            owner = next((one for one in owners if hasattr(one, command)), self)
            found = getattr(owner, command)
            answer, status = found(**json.loads(body or b"{}")) if callable(found) else found, "200 OK"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            answer, status = {"error": f"{type(error).__name__}: {error}"}, "400 BAD"
        text = json.dumps({} if answer is None else answer, default=asdict).encode()
        return status, [("Content-Type", "application/json"), ("Content-Length", str(len(text)))], text


class _RequestHandler(MotoRequestHandler):
    """Answers all requests of a connection. werkzeug ends it after each; a new one costs as much as a short call."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        """Answer one request, whose whole body the front reads. Without an answer the connection ends."""

        announced_bytes = 0

        def start_response(status: str, headers: list[tuple[str, str]]) -> None:
            nonlocal announced_bytes
            code, _, reason = status.partition(" ")
            self.send_response(int(code), reason)
            for name, value in headers:
                if name.lower() == "content-length":
                    announced_bytes = int(value)
                self.send_header(name, value)
            self.end_headers()

        try:
            app: Any = self.server.app
            sent_bytes = sum(self.wfile.write(chunk) for chunk in app(self.make_environ(), start_response))
            if sent_bytes < announced_bytes and self.command != "HEAD":  # the client would wait for the rest
                self.close_connection = True
        except ConnectionError:
            self.close_connection = True

    def date_time_string(self, timestamp: float | None = None) -> str:
        sim = SimulatedAws.current
        return super().date_time_string(sim.now() if sim.tells_time else timestamp)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


class SimulatorServer(ThreadedWSGIServer):
    """The server of a simulated cloud on loopback. `shutdown()` ends it."""

    daemon_threads = True
    front: AwsFrontend


def serve(sim: SimulatedAws, port: int = 0) -> tuple[SimulatorServer, str]:
    """Serve a cloud on loopback, in a thread. Returns the server and its address.

    The cloud does what is due at each call. `SimulatedAws.run` does it between calls too.
    """
    front = AwsFrontend(sim)
    server = SimulatorServer("127.0.0.1", port, front, _RequestHandler)
    server.front = front
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"
