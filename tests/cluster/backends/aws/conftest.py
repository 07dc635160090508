"""A simulated AWS in this process; and a rented job on the toy cloud, whose machines are never reached."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from support.local_connector import LocalConnector
from support.simcloud.in_process import front, front_of_session
from support.toy_cloud import ToyBackend, ToyCloud

from cluster.backends.aws.renting import controller as rented_controller
from cluster.connectors.hosts_file import Hosts
from cluster.state.run_folder import Run

__all__ = ["front", "front_of_session"]


class SilentFleet:
    """Machines on which agents always run; their shared folder is a local one. Background work is done at once."""

    shortage_reason = ""

    def __init__(self, spec: Any, folder: Any, **options: Any) -> None:
        self.folder, self.while_waiting = folder, options["while_waiting"]
        self.hosts = dict(zip(spec.machine_names, spec.host_list, strict=True))
        self.connectors = {name: LocalConnector() for name in self.hosts}
        self.provisioner = SimpleNamespace(job_folder=lambda name: str(folder.path / "remote"))
        self.pool = SimpleNamespace(submit=self._run_now)
        self.restarting: dict[str, Any] = {}
        self.unreachable_since: dict[str, float] = {}
        self.restarted: list[str] = []
        self.is_training = True
        self.mirror = SimpleNamespace(last_status={})
        self.received_bytes = 0
        self.broken_machines: dict[str, str] = {}

    @staticmethod
    def _run_now(function: Any, *arguments: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def agents_alive(self) -> bool:
        return self.is_training

    def pull_last_files(self, patience_seconds: float) -> bool:
        return True

    def dead_machines(self) -> list[str]:
        return []

    def replace_host(self, name: str, host: Any) -> None:
        self.hosts[name] = host
        self.broken_machines.pop(name, None)

    def restart_agent(self, name: str) -> None:
        self.restarted.append(name)

    def nothing(self) -> None: ...

    set_up_machines = push_stop_request = pull_files = write_ssh_config = close = nothing


@pytest.fixture
def make_backend(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ToyBackend]:
    """Make a job on two machines of a cloud that has three: make_backend(free_machines=3, spares=0)."""
    monkeypatch.setattr(rented_controller, "Fleet", SilentFleet)

    def make(free_machines: int = 3, **fields: Any) -> ToyBackend:
        ToyCloud.reset(free_machines)
        run = hand_made(machines=2, backend="toy", cloud={}, hosts=Hosts(None, ()), **fields)
        run.run_folder.launch_path.write_text("a launch ID")
        return ToyBackend(Run(run.spec, run.run_folder))

    return make


@pytest.fixture
def backend(make_backend: Callable[..., ToyBackend]) -> ToyBackend:
    backend = make_backend()
    assert backend.poll()
    return backend


@pytest.fixture
def poll_cloud() -> Callable[[ToyBackend], None]:
    """Poll until the controller has seen what the cloud has now."""

    def poll(backend: ToyBackend) -> None:
        for _ in range(2):
            backend.controller.last_poll_time = -1e9
            assert backend.poll()

    return poll
