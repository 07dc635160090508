"""Broken machines of a rented job are exchanged, only so many of a launch: failed boots, lost GPUs, failed set-ups."""

import json
import time
from typing import Any

import pytest
from support.toy_cloud import ToyBackend, ToyCloud

from cluster.backends.aws.renting import controller as rented_controller
from cluster.backends.aws.renting.boot import BootFailed
from cluster.errors import SetupFailed
from cluster.state.heartbeats import MachineStatus
from cluster.state.states import AgentPhase, MachineState
from cluster.state.supervisor_records import SetupRecord
from infra.errors import CloudError
from train.tools.agent_protocol import Fault
from train.tools.records import encode

BOOT_FAILED = "boot failed: no way to the internet"
GPU_LOST = "7 of 8 GPUs answer"


@pytest.fixture
def backend(make_backend: Any) -> ToyBackend:
    backend: ToyBackend = make_backend(free_machines=10)
    assert backend.poll()
    return backend


@pytest.fixture
def boot(backend: ToyBackend, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Wait for the boot of machines, of which some fail: boot(names, *failing_ids) -> the IDs that were waited for."""

    def wait_for_all(names: str, *failing_ids: str) -> list[str]:
        seen: list[str] = []

        def wait_until_ready(provider: Any, fleet: Any, name: str, list_machines: Any) -> None:
            seen.append(list_machines()[name].id)
            if seen[-1] in failing_ids:
                raise BootFailed(BOOT_FAILED)

        monkeypatch.setattr(rented_controller, "wait_until_ready", wait_until_ready)
        for name in names:
            backend.controller._wait_until_ready(name)
        return seen

    return wait_for_all


def test_machine_whose_boot_fails_is_exchanged(
    backend: ToyBackend, boot: Any, poll_cloud: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    console = f"Linux\r\n\x1b[32m[ 7.1] a\x07\r\nb\r\n\r\nimgnet: {BOOT_FAILED}\r\n"
    monkeypatch.setattr(ToyCloud, "read_console", lambda self, machine: console)
    assert boot("01", "toy-2") == ["toy-1", "toy-2", "toy-3"] and sorted(ToyCloud.rented) == ["toy-1", "toy-3"]
    path = backend.run.folder.path / "console-toy-2.log"
    reason = f"{BOOT_FAILED}; its console ends with: [ 7.1] a | b | imgnet: {BOOT_FAILED}; all of it: {path}"
    assert ToyCloud.released == [("toy-2", reason)]
    assert f"machine 1 (toy-2): {reason}; it is exchanged" in caplog.text
    assert path.read_text().splitlines()[:2] == ["Linux", "[ 7.1] a"]
    fleet: Any = backend.controller.fleet
    assert fleet.hosts["1"].address == "10.0.0.3"
    poll_cloud(backend)
    assert backend.dead_machines() == []


def test_job_does_not_move_while_a_machine_is_exchanged_nor_is_one_exchanged_after_a_move(
    backend: ToyBackend, boot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a machine of that name would be rented twice."""
    controller: Any = backend.controller
    moves = list[bool]()

    def rent_replacement(cloud: ToyCloud, name: str) -> Any:
        controller.live_machines.clear()
        moves.append(controller._must_move())
        return cloud._rent(name)

    def fail_after_a_move(*_: Any) -> None:
        controller.fleet = None
        raise BootFailed(BOOT_FAILED)

    monkeypatch.setattr(ToyCloud, "rent_replacement", rent_replacement)
    boot("1", "toy-2")
    controller.live_machines.clear()
    assert [*moves, controller._must_move()] == [False, True]
    controller.live_machines = controller.provider.list_machines()
    monkeypatch.setattr(rented_controller, "wait_until_ready", fail_after_a_move)
    with pytest.raises(SetupFailed, match=f"^{BOOT_FAILED}"):
        controller._wait_until_ready("1")
    assert sorted(ToyCloud.rented) == ["toy-1", "toy-3"]


@pytest.mark.parametrize("is_replacement", [False, True])
def test_boots_that_always_fail_end_the_job_after_two_exchanges(
    backend: ToyBackend, boot: Any, is_replacement: bool
) -> None:
    """Nobody waits for a replacement: without a stop, it would be rented again and again."""
    folder = backend.run.folder
    if is_replacement:
        record = SetupRecord(launch=folder.launch_id, is_ready=True)
        (folder.path / "machines.json").write_text(json.dumps(encode(record)))
    reason = rf"{BOOT_FAILED}; machines exchanged before: 2 of 2 \(--max-exchanges\)"
    with pytest.raises(SetupFailed, match=f"^{reason}$"):
        boot("1", "toy-2", "toy-3", "toy-4")
    assert sorted(ToyCloud.rented) == ["toy-1", "toy-4"]
    stop = backend.controller.get_stop_reason()
    assert stop.startswith(f"machine 1: {BOOT_FAILED}; machines exchanged") if is_replacement else stop == ""


@pytest.mark.parametrize("obstacle", ["no machine", "a stop", "a shortage"])
def test_failed_boot_is_final(backend: ToyBackend, boot: Any, obstacle: str) -> None:
    """When no other machine can be had, and when the job ends anyway."""
    if obstacle == "no machine":
        ToyCloud.free_machines = 0
    elif obstacle == "a stop":
        (backend.run.folder.shared / "stop").write_text("{}")
    else:
        vars(backend.controller.fleet)["shortage_reason"] = "only 0 of the 2 machines that the job needs can be used"
    with pytest.raises(SetupFailed, match=f"^{BOOT_FAILED}"):
        boot("0", "toy-1")
    assert len(ToyCloud.rented) == (1 if obstacle == "no machine" else 2)


def test_list_of_machines_older_than_an_exchange_does_not_undo_it(backend: ToyBackend, boot: Any) -> None:
    """The cloud was asked before the exchange, and its answer came after it."""
    controller = backend.controller
    asked_at = time.monotonic()
    old_list = controller.provider.list_machines()
    boot("0", "toy-1")
    for stale_list in (old_list, {"1": old_list["1"]}):
        controller._update_machines(dict(stale_list), asked_at)
        assert controller.live_machines["0"].id == "toy-3"
    controller._update_machines({"1": old_list["1"]}, time.monotonic())
    assert sorted(controller.live_machines) == ["1"]


def end_agent(backend: ToyBackend, name: str, fault: Fault = Fault.MACHINE, reason: str = GPU_LOST) -> None:
    """Let the agent of a machine end because the machine is broken, or leaves for another reason."""
    folder = backend.run.folder
    of_launch: Any = {"address": backend.controller.live_machines[name].private_ip, "launch": folder.launch_id}
    end: dict[str, Any] = {"phase": AgentPhase.ENDED, "state": MachineState.LEFT, "fault": fault, "reason": reason}
    status = MachineStatus(id=f"{name}.a", ended=True, **end, **of_launch)
    folder.status_path(name).parent.mkdir(exist_ok=True)
    folder.status_path(name).write_text(json.dumps(encode(status)))


@pytest.mark.parametrize(("fault", "reason", "shown", "exchanged"), [
    (Fault.MACHINE, f"{GPU_LOST}\x1b[2J", f"{GPU_LOST} [2J", {"toy-2"}),
    (Fault.NONE, "a spot notice", "a spot notice", set()),
])  # fmt: skip
def test_machine_that_leaves_is_replaced_and_counts_as_exchange_if_it_is_broken(
    backend: ToyBackend, fault: Fault, reason: str, shown: str, exchanged: set[str]
) -> None:
    end_agent(backend, "1", fault, reason)
    backend.replace("1")
    assert ToyCloud.released == [("toy-2", shown)] and ToyCloud.exchanged == exchanged
    # The new machine has not started its agent yet when the supervisor is started again: the status is the old one's.
    backend.replace("1")
    fleet: Any = backend.controller.fleet
    assert ToyCloud.exchanged == exchanged and sorted(ToyCloud.rented) == ["toy-1", "toy-3"]
    assert fleet.restarted == ["1", "1"]


def test_refused_termination_counts_as_one_exchange(backend: ToyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal has the machine before the cloud is asked, so the next attempt to terminate it is allowed."""

    def refuse(self: ToyCloud, ids: list[str], reason: str, is_exchange: bool = False) -> None:
        ToyCloud.exchanged.update(ids)
        raise CloudError("throttled")

    backend.controller.provider.max_exchanges = 1
    end_agent(backend, "1")
    with monkeypatch.context() as context:
        context.setattr(ToyCloud, "terminate", refuse)
        backend.replace("1")
        assert backend.dead_machines() == [] and sorted(ToyCloud.rented) == ["toy-1", "toy-2"]
    backend.replace("1")
    assert sorted(ToyCloud.rented) == ["toy-1", "toy-3"] and backend.controller.get_stop_reason() == ""


@pytest.mark.parametrize("max_exchanges", [2, 1])
def test_job_whose_machines_are_all_broken_moves_or_ends(backend: ToyBackend, max_exchanges: int) -> None:
    """No agent is left that could save anything."""
    controller: Any = backend.controller
    controller.provider.max_exchanges = max_exchanges
    for name in ("0", "1"):
        end_agent(backend, name)
    controller.fleet.is_training = False
    if max_exchanges == 2:
        assert backend.poll() and controller.fleet is None and ToyCloud.rented == {}
        assert ToyCloud.exchanged == {"toy-1", "toy-2"}
    else:
        with pytest.raises(SetupFailed, match=rf"^machine 1: {GPU_LOST}; machines exchanged before: 1 of 1"):
            backend.poll()


@pytest.mark.parametrize("max_exchanges", [2, 1, 0])
def test_spares_that_were_broken_at_the_set_up_are_exchanged_while_the_job_trains(
    backend: ToyBackend, max_exchanges: int
) -> None:
    """Without an exchange left they stay as they are: the job does not need them."""
    controller: Any = backend.controller
    controller.provider.max_exchanges = max_exchanges
    controller.fleet.broken_machines = {"0": GPU_LOST, "1": GPU_LOST}
    names = backend.dead_machines()
    assert names == ["0", "1"][:max_exchanges]
    for name in names:
        backend.replace(name)
    assert ToyCloud.released == [("toy-1", GPU_LOST), ("toy-2", GPU_LOST)][:max_exchanges]
    assert controller.fleet.restarted == names and backend.dead_machines() == []
    assert controller.get_stop_reason() == ""


def test_machine_whose_gpus_do_not_answer_during_set_up_is_exchanged(backend: ToyBackend) -> None:
    fleet: Any = backend.controller.fleet
    broken_ids = {"toy-2", "toy-3"}

    def set_up_machines() -> None:
        fleet.broken_machines = {each.name: GPU_LOST for each in ToyCloud.rented.values() if each.id in broken_ids}
        if fleet.broken_machines:
            raise SetupFailed(f"machine: {GPU_LOST}")

    fleet.set_up_machines = set_up_machines
    assert backend.poll()
    assert ToyCloud.exchanged == {"toy-2", "toy-3"} and sorted(ToyCloud.rented) == ["toy-1", "toy-4"]
    broken_ids.add("toy-4")
    with pytest.raises(SetupFailed, match=rf"^machine 1: {GPU_LOST}; machines exchanged before: 2 of 2"):
        backend.poll()
