"""The controller of rented jobs with a cloud of which it knows nothing but the interface."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from support.toy_cloud import ToyBackend, ToyCloud

from cluster.backends.rented import controller as rented_controller
from cluster.connectors.hosts_file import Hosts
from cluster.connectors.ssh import Unreachable
from cluster.errors import NoCloudAccess, SetupFailed
from cluster.state.run_folder import Run
from cluster.state.supervisor_records import read_activity
from infra.errors import NoCredentials

Fixture = Any


class SilentFleet:
    """Machines on which agents always run. Background work is done at once."""

    def __init__(self, spec: Any, folder: Any, **_: Any) -> None:
        self.hosts = dict(zip(spec.machine_names, Hosts.from_json(spec.hosts).machines, strict=True))
        self.pool = SimpleNamespace(submit=self._run_now)
        self.restarting: dict[str, Any] = {}
        self.restarted: list[str] = []
        self.is_training = True

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

    def explain_end(self) -> str:
        return "machine 0: its answer was dropped"

    def dead_machines(self) -> list[str]:
        return []

    def replace_host(self, name: str, host: Any) -> None:
        self.hosts[name] = host

    def restart_agent(self, name: str) -> None:
        self.restarted.append(name)

    def nothing(self) -> None: ...

    set_up_machines = push_stop_request = pull_files = close = nothing


@pytest.fixture
def backend(hand_made: Fixture, monkeypatch: pytest.MonkeyPatch) -> ToyBackend:
    """A job on two machines of a cloud that has three."""
    monkeypatch.setattr(rented_controller, "Fleet", SilentFleet)
    ToyCloud.reset(free_machines=3)
    run = hand_made(machines=2, backend="toy", cloud={}, hosts={"shared": None, "machines": []})
    run.run_folder.launch_path.write_text("a launch ID")
    return ToyBackend(Run(run.spec, run.run_folder))


def poll_cloud(backend: ToyBackend) -> None:
    """Poll until the controller has seen what the cloud has now."""
    for _ in range(2):
        backend.controller.last_poll_time = -1e9
        assert backend.poll()


def test_lost_machine_is_replaced_and_nothing_stays_rented(backend: ToyBackend) -> None:
    assert backend.poll()
    assert sorted(ToyCloud.rented) == ["toy-1", "toy-2"] and backend.dead_machines() == []

    del ToyCloud.rented["toy-2"]
    poll_cloud(backend)
    assert backend.dead_machines() == ["1"]
    backend.replace("1")
    assert backend.dead_machines() == []
    poll_cloud(backend)
    fleet: Any = backend.controller.fleet
    new_machine = backend.controller.live_machines["1"]
    assert new_machine.id in ToyCloud.rented and len(ToyCloud.rented) == 2 and fleet.restarted == ["1"]
    assert fleet.hosts["1"].address == new_machine.private_ip

    assert backend.terminate() == [] and ToyCloud.rented == {}
    assert backend.terminate() == []


def test_supervisor_knows_why_the_machines_tell_nothing(backend: ToyBackend) -> None:
    assert backend.explain_end() == "" and not backend.agents_alive(), "another process has no connections"
    assert backend.poll()
    assert backend.explain_end() == "machine 0: its answer was dropped" and backend.agents_alive()


def test_job_moves_when_no_replacement_can_be_rented(backend: ToyBackend) -> None:
    """Too few machines are left, and the cloud refuses to rent another: all are given back, and rented anew."""
    assert backend.poll()
    ToyCloud.rented.clear()
    poll_cloud(backend)
    assert backend.controller.fleet is None and ToyCloud.rented == {}
    with pytest.raises(SetupFailed, match="the toy cloud has 1 machines"):
        backend.poll()


def test_kill_machine_and_a_refused_replacement(backend: ToyBackend) -> None:
    assert backend.poll()
    ToyCloud.free_machines = 0
    backend.kill_machine("0", None)
    assert ToyCloud.released == [("toy-1", "lost in a rehearsal")]
    poll_cloud(backend)
    backend.replace("0")
    assert backend.dead_machines() == ["0"]
    assert backend.controller.last_refusal == "the toy cloud has no machine left"


def test_messages_of_the_controller_are_the_jobs_activity(
    backend: ToyBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="cluster.backends")
    assert backend.poll()
    del ToyCloud.rented["toy-2"]
    poll_cloud(backend)
    activity = read_activity(backend.run.folder.path)
    assert activity and activity.doing == "machine 1 (toy-2) is gone"


def raise_no_credentials(*_: Any) -> Any:
    raise NoCredentials("the toy cloud: no credentials")


def raise_unreachable() -> None:
    raise Unreachable("machine 0 (10.0.0.1): does not answer")


@pytest.mark.parametrize("end", ["result.json", "stop"])
def test_job_that_is_over_is_settled_though_its_machines_went_unreachable(backend: ToyBackend, end: str) -> None:
    assert backend.poll()
    fleet: Any = backend.controller.fleet
    fleet.pull_files = raise_unreachable
    (backend.run.folder.shared / end).write_text("{}")
    poll_cloud(backend)  # the machines exist: they may answer again
    ToyCloud.rented.clear()
    backend.controller.last_poll_time = -1e9
    assert [backend.poll() for _ in range(3)][-1] is False


def test_unreachable_machines_of_a_job_that_goes_on_are_waited_for(backend: ToyBackend) -> None:
    assert backend.poll()
    fleet: Any = backend.controller.fleet
    fleet.pull_files = raise_unreachable
    poll_cloud(backend)


def test_refused_credentials_are_an_access_error_until_they_are_accepted(
    backend: ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backend.access_error() == "" and backend.poll()
    with monkeypatch.context() as context:
        context.setattr(ToyCloud, "list_machines", raise_no_credentials)
        poll_cloud(backend)
        assert "no credentials; the machines power off" in backend.access_error()
    poll_cloud(backend)
    assert backend.access_error() == ""
    backend.controller.fleet = None  # as in a supervisor that was just started
    monkeypatch.setattr(ToyCloud, "list_machines", raise_no_credentials)
    with pytest.raises(NoCloudAccess, match="no credentials"):
        backend.poll()
