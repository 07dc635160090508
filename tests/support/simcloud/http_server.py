"""The door of the simulated cloud: a server on loopback that counts calls, makes faults, and takes orders by /_sim/."""

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
from support.simcloud.aws_protocol import error_body, named_action
from support.simcloud.cloud import Sim
from support.simcloud.control import ORDERS
from support.simcloud.peer import kill, peer_pids
from support.simcloud.prices import TARGETS, ServiceError
from werkzeug.serving import BaseWSGIServer, make_server

Answer = tuple[str, list[tuple[str, str]], bytes]


@dataclass
class Fault:
    """What goes wrong: at calls of this action (and service, if named), after `skip` of them, `times` times.

    With a code, the answer is that error; with `drop` the connection ends without one; with neither, only `delay`
    seconds pass before the call is done. `after`: the call is done first, and its answer is lost. `when`: at the call
    of this number only, counted from 1 over all calls.
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
    delay: float = 0.0
    when: int | None = None

    def hits(self, service: str, action: str, number: int) -> bool:
        """True if it strikes this call; uses up one of its times."""
        named = self.action in ("", action) and self.service in ("", service)
        if not named or self.times < 1 or self.when not in (None, number):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


@dataclass
class Front:
    """The WSGI application. `calls` are (service, action) in order; orders by /_sim/ are not among them."""

    sim: Sim
    calls: list[tuple[str, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    kills: dict[int, str] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.Lock()

    def reset(self) -> None:
        """An empty cloud, no faults, nothing counted."""
        with self.lock:
            self.calls, self.faults, self.kills, self.killed = [], [], {}, []
        self.sim.reset()

    def count(self, action: str = "") -> Any:
        """How often an action was called; without one, all by action."""
        counted = Counter(name for _, name in self.calls)
        return counted[action] if action else dict(counted)

    def fault(self, **words: Any) -> Fault:
        """Add a fault."""
        one = Fault(**words)
        with self.lock:
            self.faults.append(one)
        return one

    def kill_caller_at(self, number: int, when: str = "before") -> None:
        """SIGKILL who makes the call of this number (from 1), before or after it is done."""
        if when not in ("before", "after"):
            raise ValueError("when: before or after")
        with self.lock:
            self.kills[number] = when

    # --- calls -----------------------------------------------------------------------------------------------------

    def __call__(self, environ: dict[str, Any], start: Any) -> list[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        if environ["PATH_INFO"].startswith("/_sim/"):
            status, headers, answer = self.order(environ["PATH_INFO"][6:], body)
        else:
            status, headers, answer = self.call(environ, body)
        start(status, headers)
        return [answer]

    def call(self, environ: dict[str, Any], body: bytes) -> Answer:
        """One API call, with what goes wrong at it. Raises ConnectionError: there is no answer."""
        service, region, action = named_action(environ, body)
        with self.lock:
            self.calls.append((service, action))
            number = len(self.calls)
            fault = next((one for one in self.faults if one.hits(service, action, number)), None)
            death = self.kills.pop(number, None)
        if death == "before":
            return self._kill(environ, service)
        if fault is not None and fault.delay:
            time.sleep(fault.delay)
        spoiled = fault is not None and (fault.drop or bool(fault.code))
        answer = None if spoiled and not fault.after else self.do(environ, body, service, region)  # type: ignore[union-attr]
        if death == "after":
            return self._kill(environ, service)
        if fault is not None and fault.drop:
            _hang_up(environ)
        if answer is None or spoiled:
            assert fault is not None
            return error_body(service, fault.code, fault.message, fault.status)
        return answer

    def do(self, environ: dict[str, Any], body: bytes, service: str, region: str) -> Answer:
        """Let moto, or one of the services that it lacks, do the call."""
        target = TARGETS.get(environ.get("HTTP_X_AMZ_TARGET", ""))
        if target is not None:
            try:
                with self.sim.lock:
                    text = json.dumps(target(self.sim, region, json.loads(body or b"{}"))).encode()
            except ServiceError as error:
                return error_body(service, error.code, error.message, error.status)
            return "200 OK", [("Content-Type", "application/x-amz-json-1.1"), ("Content-Length", str(len(text)))], text
        if service in ("pricing", "servicequotas"):
            return error_body(service, "NotImplemented", "not in the simulated cloud", 501)
        return self._moto(environ, body)

    def _moto(self, environ: dict[str, Any], body: bytes) -> Answer:
        said: list[Any] = []
        chunks = self.app({**environ, "wsgi.input": io.BytesIO(body)}, lambda *words: said.append(words[:2]))
        answer = b"".join(chunks)
        status, headers = said[0]
        return status, [one for one in headers if one[0].lower() != "connection"], answer

    def _kill(self, environ: dict[str, Any], service: str) -> Answer:
        pids = peer_pids(environ["REMOTE_ADDR"], int(environ["REMOTE_PORT"]), int(environ["SERVER_PORT"]))
        self.killed += pids
        kill(pids)
        if pids:
            _hang_up(environ)
        return error_body(service, "SimulatorBroken", "nobody but this process is at the other end", None)

    # --- orders ----------------------------------------------------------------------------------------------------

    def order(self, what: str, body: bytes) -> Answer:
        """Do an order of /_sim/; its answer, or {"error": line} with status 400."""
        try:
            words = json.loads(body or b"{}")
            if what not in ORDERS:
                raise KeyError(f"no order {what}")
            done, status = ORDERS[what](self, words), "200 OK"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            done, status = {"error": f"{type(error).__name__}: {error}"}, "400 BAD"
        text = json.dumps({} if done is None else done, default=asdict).encode()
        return status, [("Content-Type", "application/json"), ("Content-Length", str(len(text)))], text


def _hang_up(environ: dict[str, Any]) -> None:
    """End the connection without an answer."""
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("the answer is lost, as asked")


class _Quiet(MotoRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


def serve(port: int = 0, sim: Sim | None = None) -> tuple[BaseWSGIServer, str]:
    """Serve a cloud on loopback, in a thread. `server.front` is its Front; `server.shutdown()` ends it."""
    sim = sim or Sim()
    front = Front(sim)
    server = make_server("127.0.0.1", port, front, threaded=True, request_handler=_Quiet)
    server.daemon_threads = True  # type: ignore[attr-defined]
    server.front = front  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    if not getattr(sim, "ticking", False):
        sim.ticking = True  # type: ignore[attr-defined]
        threading.Thread(target=sim.run, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"
