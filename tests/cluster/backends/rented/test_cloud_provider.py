"""The controller of rented jobs with a cloud of which it knows nothing but the interface."""

import json
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from support.toy_cloud import ToyBackend, ToyCloud

from cluster.backends.rented import controller as rented_controller
from cluster.backends.rented.boot import BootFailed
from cluster.connectors.hosts_file import Hosts
from cluster.connectors.ssh import Unreachable
from cluster.errors import NoCloudAccess, SetupFailed
from cluster.state.heartbeats import MachineStatus
from cluster.state.run_folder import Run, stop_reason
from cluster.state.states import AgentPhase, MachineState
from cluster.state.supervisor_records import SetupRecord, read_activity
from infra.errors import CloudError, NoCredentials
from train.tools.records import encode
from train.tools.trainer_reports import Fault

Fixture = Any


class SilentFleet:
    """Machines on which agents always run. Background work is done at once."""

    def __init__(self, spec: Any, folder: Any, **options: Any) -> None:
        self.folder, self.while_waiting = folder, options["while_waiting"]
        self.hosts = dict(zip(spec.machine_names, spec.host_list, strict=True))
        self.pool = SimpleNamespace(submit=self._run_now)
        self.restarting: dict[str, Any] = {}
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

    def explain_end(self) -> str:
        return "machine 0: its answer was dropped"

    def dead_machines(self) -> list[str]:
        return []

    def replace_host(self, name: str, host: Any) -> None:
        self.hosts[name] = host
        self.broken_machines.pop(name, None)

    def restart_agent(self, name: str) -> None:
        self.restarted.append(name)

    def nothing(self) -> None: ...

    shortage_reason = ""
    broken_machines: dict[str, str] = {}  # noqa: RUF012

    set_up_machines = push_stop_request = pull_files = write_ssh_config = close = nothing


@pytest.fixture
def backend(hand_made: Fixture, monkeypatch: pytest.MonkeyPatch) -> ToyBackend:
    """A job on two machines of a cloud that has three."""
    monkeypatch.setattr(rented_controller, "Fleet", SilentFleet)
    ToyCloud.reset(free_machines=3)
    run = hand_made(machines=2, backend="toy", cloud={}, hosts=Hosts(None, ()))
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


def test_price_limit_is_watched_while_machines_are_set_up(backend: ToyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may take hours to answer its set-up, and all of them are billed."""

    def set_up_machines(fleet: SilentFleet) -> None:
        for _ in range(3):
            fleet.while_waiting()
            if reason := stop_reason(fleet.folder.shared):
                raise SetupFailed(reason)

    monkeypatch.setattr(SilentFleet, "set_up_machines", set_up_machines)
    assert backend.poll()
    monkeypatch.setattr(ToyCloud, "max_dollars", 5.0)
    checks = iter([False, True])  # the first by `poll` itself
    monkeypatch.setattr(ToyCloud, "is_price_limit_reached", property(lambda self: next(checks)))
    with pytest.raises(SetupFailed, match=r"^the limit of 5 dollars \(--max-price-total\) was reached"):
        backend.poll()


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


# --- machines at risk -------------------------------------------------------------------------------------------------

RISK = "EC2 may interrupt it soon"


@pytest.fixture
def late_spares(hand_made: Fixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job on two machines with two spares that are rented late, on a cloud that has four; `.backend` runs it."""
    monkeypatch.setattr(rented_controller, "Fleet", SilentFleet)
    monkeypatch.setattr(ToyCloud, "first_names", ("0", "1"))
    monkeypatch.setattr(ToyCloud, "rents_spares_late", True)
    monkeypatch.setattr(ToyCloud, "rent_all", lambda self: {name: self._rent(name) for name in self.first_names})
    ToyCloud.reset(free_machines=4)
    run = hand_made(machines=2, spares=2, backend="toy", cloud={}, hosts=Hosts(None, ()))
    run.run_folder.launch_path.write_text("a launch ID")
    run.backend = ToyBackend(Run(run.spec, run.run_folder))
    return run


def test_late_spares_are_rented_for_machines_at_risk_and_no_machine_is_given_back(
    late_spares: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend: ToyBackend = late_spares.backend
    assert backend.poll()
    assert sorted(backend.controller.live_machines) == ["0", "1"] and backend.dead_machines() == []
    with pytest.raises(SetupFailed, match=r"^not rented yet$"):
        backend.controller._wait_until_ready("2")
    late_spares.write_status("training", "1", phase="running", risk_reason=RISK, launch="a launch ID")
    for _ in range(3):
        poll_cloud(backend)
    assert caplog.text.count(f"machine 1: {RISK}; it goes on training") == 1
    assert backend.dead_machines() == ["2"], "one spare for one machine at risk"
    backend.replace("2")
    poll_cloud(backend)
    fleet: Any = backend.controller.fleet
    assert sorted(backend.controller.live_machines) == ["0", "1", "2"] and fleet.restarted == ["2"]
    late_spares.write_status("training", "1", phase="running", launch="a launch ID")
    poll_cloud(backend)
    assert ToyCloud.released == [] and backend.dead_machines() == []
    ToyCloud.rented.pop(backend.controller.live_machines["2"].id)
    backend.controller.rented_at.clear()  # else it counts as just rented, and the cloud's list as older
    poll_cloud(backend)
    assert backend.dead_machines() == ["2"], "once due, a spare is replaced like any other machine"


def test_machine_at_risk_of_a_job_without_spares_is_logged_only(
    backend: ToyBackend, caplog: pytest.LogCaptureFixture
) -> None:
    assert backend.poll()
    status = {"id": "0.a", "phase": "running", "state": "training", "risk_reason": RISK, "launch": "a launch ID"}
    path = backend.run.folder.status_path("0")
    path.parent.mkdir()
    path.write_text(json.dumps(status))
    poll_cloud(backend)
    assert f"machine 0: {RISK}" in caplog.text and backend.dead_machines() == [] == ToyCloud.released
    assert len(ToyCloud.rented) == 2


# --- boots that fail -------------------------------------------------------------------------------------------------


class Boots:
    """Stands in for the waiter: the boots of some machines fail, by ID."""

    def __init__(self, *failing_ids: str) -> None:
        self.failing_ids = failing_ids
        self.seen: list[str] = []

    def wait_until_ready(self, fleet: Any, name: str, list_machines: Any) -> None:
        """Fail, or return at once."""
        machine = list_machines()[name]
        self.seen.append(machine.id)
        if machine.id in self.failing_ids:
            raise BootFailed("boot failed: no way to the internet")


def set_up_all(backend: ToyBackend, boots: Boots) -> None:
    """Rent the machines and wait for the boot of each."""
    assert backend.poll()
    controller: Any = backend.controller
    controller.boot_waiter = boots
    for name in ("0", "1"):
        controller._wait_until_ready(name)


def test_machine_whose_boot_fails_is_exchanged(
    backend: ToyBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    console = "Linux\r\n\x1b[32m[ 7.1] a\x07\r\nb\r\n\r\nimgnet: boot failed: no way to the internet\r\n"
    monkeypatch.setattr(ToyCloud, "read_console", lambda self, machine: console)
    boots = Boots("toy-2")
    set_up_all(backend, boots)
    path = backend.run.folder.path / "console-toy-2.log"
    reason = (
        "boot failed: no way to the internet; its console ends with: [ 7.1] a | b | "
        f"imgnet: boot failed: no way to the internet; all of it: {path}"
    )
    assert boots.seen == ["toy-1", "toy-2", "toy-3"] and sorted(ToyCloud.rented) == ["toy-1", "toy-3"]
    assert ToyCloud.released == [("toy-2", reason)]
    assert f"machine 1 (toy-2): {reason}; it is exchanged" in caplog.text
    assert path.read_text().splitlines()[:2] == ["Linux", "[ 7.1] a"]
    fleet: Any = backend.controller.fleet
    assert fleet.hosts["1"].address == "10.0.0.3"
    poll_cloud(backend)
    assert backend.dead_machines() == []


def test_boots_that_always_fail_end_the_job_after_two_exchanges(backend: ToyBackend) -> None:
    ToyCloud.free_machines = 10
    boots = Boots("toy-1", "toy-3", "toy-4")
    with pytest.raises(
        SetupFailed,
        match=r"^boot failed: no way to the internet; machines exchanged before: 2 of 2 \(--max-exchanges\)$",
    ):
        set_up_all(backend, boots)
    assert boots.seen == ["toy-1", "toy-3", "toy-4"] and sorted(ToyCloud.rented) == ["toy-2", "toy-4"]


@pytest.mark.parametrize("obstacle", ["no machine", "a stop", "a shortage"])
def test_failed_boot_is_final(backend: ToyBackend, obstacle: str) -> None:
    """When no other machine can be had, and when the job ends anyway."""
    assert backend.poll()
    fleet: Any = backend.controller.fleet
    if obstacle == "no machine":
        ToyCloud.free_machines = 0
    elif obstacle == "a stop":
        (backend.run.folder.shared / "stop").write_text("{}")
    else:
        fleet.shortage_reason = "only 0 of the 2 machines that the job needs can be used"
    controller: Any = backend.controller
    controller.boot_waiter = Boots("toy-1")
    with pytest.raises(SetupFailed, match=r"^boot failed: no way to the internet"):
        controller._wait_until_ready("0")
    assert len(ToyCloud.rented) == (1 if obstacle == "no machine" else 2)


def test_replacement_whose_boot_fails_too_often_stops_the_job(backend: ToyBackend) -> None:
    """Nobody waits for a replacement: without the stop, it would be rented again and again."""
    ToyCloud.free_machines = 10
    assert backend.poll()
    mark_set_up(backend)
    controller: Any = backend.controller
    controller.boot_waiter = Boots("toy-2", "toy-3", "toy-4")
    with pytest.raises(SetupFailed, match="no way to the internet; machines exchanged before: 2 of 2"):
        controller._wait_until_ready("1")
    assert controller.get_stop_reason().startswith("machine 1: boot failed: no way to the internet; machines exchanged")


def test_list_of_machines_older_than_an_exchange_does_not_undo_it(backend: ToyBackend) -> None:
    """The cloud was asked before the exchange, and its answer came after it."""
    assert backend.poll()
    controller: Any = backend.controller
    asked_at = time.monotonic()
    old_list = controller.provider.list_machines()
    controller.boot_waiter = Boots("toy-1")
    controller._wait_until_ready("0")
    for stale_list in (old_list, {"1": old_list["1"]}):
        controller._update_machines(dict(stale_list), asked_at)
        assert controller.live_machines["0"].id == "toy-3"
    controller._update_machines({"1": old_list["1"]}, time.monotonic())
    assert sorted(controller.live_machines) == ["1"]


# --- broken machines -------------------------------------------------------------------------------------------------

GPU_LOST = "7 of 8 GPUs answer"


def mark_set_up(backend: ToyBackend) -> None:
    """Let the job's machines be set up, as the run folder says."""
    folder = backend.run.folder
    record = SetupRecord(launch=folder.launch_id, is_ready=True)
    (folder.path / "machines.json").write_text(json.dumps(encode(record)))


def end_agent(backend: ToyBackend, name: str, fault: Fault = Fault.MACHINE, reason: str = GPU_LOST) -> None:
    """Let the agent of a machine end because the machine is broken, or leaves for another reason."""
    folder = backend.run.folder
    machine = backend.controller.live_machines[name]
    status = MachineStatus(
        id=f"{name}.a",
        address=machine.private_ip,
        phase=AgentPhase.ENDED,
        state=MachineState.LEFT,
        ended=True,
        fault=fault,
        reason=reason,
        launch=folder.launch_id,
    )
    folder.status_path(name).parent.mkdir(exist_ok=True)
    folder.status_path(name).write_text(json.dumps(encode(status)))


def test_broken_machine_is_exchanged(backend: ToyBackend, caplog: pytest.LogCaptureFixture) -> None:
    assert backend.poll()
    end_agent(backend, "1", reason=f"{GPU_LOST}\x1b[2J")
    backend.replace("1")
    fleet: Any = backend.controller.fleet
    reason = f"{GPU_LOST} [2J"
    assert ToyCloud.released == [("toy-2", reason)] and ToyCloud.exchanged == {"toy-2"}
    assert sorted(ToyCloud.rented) == ["toy-1", "toy-3"] and fleet.restarted == ["1"]
    assert f"machine 1 (toy-2): {reason}; it is exchanged" in caplog.text


def test_machine_that_leaves_is_replaced_and_is_no_exchange(backend: ToyBackend) -> None:
    assert backend.poll()
    end_agent(backend, "1", Fault.NONE, "a spot notice")
    backend.replace("1")
    assert ToyCloud.released == [("toy-2", "a spot notice")] and ToyCloud.exchanged == set()


def test_last_status_of_an_exchanged_machine_does_not_exchange_the_next_one(backend: ToyBackend) -> None:
    """The new machine has not started its agent yet when the supervisor is started again."""
    assert backend.poll()
    end_agent(backend, "1")
    backend.replace("1")
    backend.replace("1")
    fleet: Any = backend.controller.fleet
    assert ToyCloud.exchanged == {"toy-2"} and sorted(ToyCloud.rented) == ["toy-1", "toy-3"]
    assert fleet.restarted == ["1", "1"]


def test_more_broken_machines_than_may_be_exchanged_stop_the_job(backend: ToyBackend) -> None:
    """A supervisor that is started again counts on. The machines that still work save a checkpoint."""
    ToyCloud.free_machines = 10
    assert backend.poll()
    for _ in range(2):
        end_agent(backend, "1")
        backend.replace("1")
        assert backend.dead_machines() == []
    restarted = ToyBackend(backend.run)
    assert restarted.poll()
    end_agent(restarted, "1")
    restarted.replace("1")
    assert len(ToyCloud.exchanged) == 2 and sorted(ToyCloud.rented) == ["toy-1", "toy-4"]
    reason = f"machine 1: {GPU_LOST}; machines exchanged before: 2 of 2 (--max-exchanges)"
    assert restarted.controller.get_stop_reason() == reason


def test_refused_termination_counts_as_one_exchange(backend: ToyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal has the machine before the cloud is asked, so the next attempt to terminate it is allowed."""
    controller: Any = backend.controller
    controller.exchange.max_exchanges = 1
    assert backend.poll()
    terminate = ToyCloud.terminate

    def refuse(self: ToyCloud, ids: list[str], reason: str, is_exchange: bool = False) -> None:
        ToyCloud.exchanged.update(ids)
        raise CloudError("throttled")

    end_agent(backend, "1")
    monkeypatch.setattr(ToyCloud, "terminate", refuse)
    backend.replace("1")
    assert backend.dead_machines() == [] and sorted(ToyCloud.rented) == ["toy-1", "toy-2"]
    monkeypatch.setattr(ToyCloud, "terminate", terminate)
    backend.replace("1")
    assert sorted(ToyCloud.rented) == ["toy-1", "toy-3"] and controller.get_stop_reason() == ""


@pytest.mark.parametrize("max_exchanges", [2, 1])
def test_job_whose_machines_are_all_broken_moves_or_ends(backend: ToyBackend, max_exchanges: int) -> None:
    """No agent is left that could save anything."""
    ToyCloud.free_machines = 10
    assert backend.poll()
    controller: Any = backend.controller
    controller.exchange.max_exchanges = max_exchanges
    for name in ("0", "1"):
        end_agent(backend, name)
    controller.fleet.is_training = False
    controller.fleet.pull_last_files = lambda patience_seconds: True
    if max_exchanges == 2:
        assert backend.poll() and controller.fleet is None and ToyCloud.rented == {}
        assert ToyCloud.exchanged == {"toy-1", "toy-2"}
    else:
        with pytest.raises(SetupFailed, match=rf"^machine 1: {GPU_LOST}; machines exchanged before: 1 of 1"):
            backend.poll()


class BrokenSetUp:
    """Stands in for the set-up of the machines: it fails while a machine is there whose GPUs do not answer."""

    def __init__(self, fleet: Any, *broken_ids: str) -> None:
        self.fleet = fleet
        self.broken_ids = broken_ids

    def set_up(self) -> None:
        """Fail, or return at once."""
        self.fleet.broken_machines = {
            machine.name: GPU_LOST for machine in ToyCloud.rented.values() if machine.id in self.broken_ids
        }
        if self.fleet.broken_machines:
            raise SetupFailed(f"machine: {GPU_LOST}")


@pytest.mark.parametrize("max_exchanges", [2, 1, 0])
def test_spares_that_were_broken_at_the_set_up_are_exchanged_while_the_job_trains(
    backend: ToyBackend, max_exchanges: int
) -> None:
    """Without an exchange left they stay as they are: the job does not need them."""
    ToyCloud.free_machines = 10
    assert backend.poll()
    controller: Any = backend.controller
    controller.exchange.max_exchanges = max_exchanges
    controller.fleet.broken_machines = {"0": GPU_LOST, "1": GPU_LOST}
    names = backend.dead_machines()
    assert names == ["0", "1"][:max_exchanges]
    for name in names:
        backend.replace(name)
    assert ToyCloud.released == [("toy-1", GPU_LOST), ("toy-2", GPU_LOST)][:max_exchanges]
    assert controller.fleet.restarted == names and backend.dead_machines() == []
    assert controller.get_stop_reason() == ""


def test_machine_whose_gpus_do_not_answer_during_set_up_is_exchanged(backend: ToyBackend) -> None:
    ToyCloud.free_machines = 10
    assert backend.poll()
    controller: Any = backend.controller
    controller.fleet.set_up_machines = BrokenSetUp(controller.fleet, "toy-2", "toy-3").set_up
    assert backend.poll()
    assert ToyCloud.exchanged == {"toy-2", "toy-3"} and sorted(ToyCloud.rented) == ["toy-1", "toy-4"]
    controller.fleet.set_up_machines = BrokenSetUp(controller.fleet, "toy-4").set_up
    with pytest.raises(SetupFailed, match=rf"^machine 1: {GPU_LOST}; machines exchanged before: 2 of 2"):
        backend.poll()
