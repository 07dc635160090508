"""Setting up over the real sshd of the testbed, with a shell script that stands for Python there: whatever is wrong
with a machine is named before anything starts, and a supervisor that is killed is followed by one that finishes.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ssh_machines import Testbed

from benchmarks.launch import supervisor_pids
from benchmarks.launch_stub import RECIPE, StubDelays
from cluster.connectors.hosts_file import Hosts, read_hosts
from cluster.connectors.known_hosts import fingerprint
from cluster.errors import SetupFailed
from cluster.machines.fleet import Fleet

QUICK = StubDelays(environment=0, probe=0, network=0, start=0, beat=0.2)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with Testbed(tmp_path_factory.mktemp("testbed") / "bed", 3) as one:
        yield one


class Rig:
    """A job on machines of the testbed, asked for and nothing more; and the script that is their Python."""

    def __init__(self, hand_made: Callable[..., Any], bed: Testbed, path: Path, *numbers: int, **spec: Any) -> None:
        self.bed, self.stub = bed, QUICK.write_script(path / "python")
        (path / "python.d").mkdir()
        found = read_hosts(bed.write_hosts_toml(path / "hosts.toml", python=str(self.stub)))
        self.hosts = Hosts(found.shared, tuple(found.machines[number] for number in numbers))
        self.make, self.spec, self.fleets = hand_made, spec, list[Fleet]()

    def change(self, place: int, **changes: Any) -> None:
        """Let a machine be another than it is."""
        machines = [replace(one, **changes) if at == place else one for at, one in enumerate(self.hosts.machines)]
        self.hosts = Hosts(self.hosts.shared, tuple(machines))

    def fleet(self) -> Fleet:
        """The job's machines as a supervisor sees them."""
        values = {"machines": len(self.hosts.machines), "backend": "ssh", "hosts": self.hosts.to_json()}
        one = self.make(uid=f"job-1-{time.monotonic_ns()}", **{**values, **self.spec})
        one.folders.launch_path.write_text("first")
        self.fleets.append(Fleet(one.spec, one.folders, reconnect_seconds=3))
        return self.fleets[-1]

    def says(self, call: str, script: str) -> None:
        """Let a call such as "cluster.machines.probe-1" run these lines first."""
        (self.stub.with_name("python.d") / call).write_text(script)

    def calls(self, module: str) -> list[str]:
        """The numbers of the machines that this module was called on, sorted."""
        log = self.stub.with_name("python.log")
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return sorted(machine for name, machine in lines if name == module)

    def close(self) -> None:
        for one in self.fleets:
            one.terminate()
            one.close()


@pytest.fixture
def rig(hand_made: Callable[..., Any], bed: Testbed, tmp_path: Path, place: Any) -> Iterator[Callable[..., Rig]]:
    """A job on the machines of these numbers: rig(0, 1, spares=1)."""
    made: list[Rig] = []

    def make(*numbers: int, **spec: Any) -> Rig:
        made.append(Rig(hand_made, bed, tmp_path, *numbers, **spec))
        return made[-1]

    yield make
    for one in made:
        one.close()
    place.wait_for(lambda: not bed.leaks(), 20)


def lock_out(rig: Rig) -> None:
    key = rig.bed.folder / "stranger"
    rig.change(1, key=str(key if key.exists() else rig.bed.new_key("stranger")))


def swap_key(rig: Rig) -> None:
    rig.change(1, host_key=rig.bed.machines[0].host_key)


def take_tmux(rig: Rig) -> None:
    """Machine 2 is the one without."""
    tools = rig.bed.folder / "tools"
    if not tools.exists():
        tools.mkdir()
        for path in (one for folder in os.defpath.split(":") for one in Path(folder).iterdir()):
            if path.name != "tmux" and not (tools / path.name).exists():
                (tools / path.name).symlink_to(path)
    machine = rig.bed.machines[2]
    machine._variables["PATH"] = str(tools)
    machine.configure("")
    rig.change(1, **vars(read_hosts(rig.bed.write_hosts_toml(rig.stub.with_name("all.toml"))).machines[2]))
    rig.change(1, python=str(rig.stub))


def break_probe(rig: Rig) -> None:
    rig.says("cluster.machines.probe-1", 'echo "first"; echo "the shared folder is away"; exit 1')


def take_space(rig: Rig) -> None:
    rig.says("cluster.machines.probe-1", "free=1")


def break_python(rig: Rig) -> None:
    rig.says("cluster.machines.python_env-1", """echo 'making'; echo '{"python": null, "why": "no pip"}'; exit 1""")


def garble_python(rig: Rig) -> None:
    rig.says("cluster.machines.python_env-1", "echo 'Segmentation fault'; exit 139")


def cut_network(rig: Rig) -> None:
    rig.says("train.distributed.network_probe-1", "echo 'no route to machine 0'; exit 1")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lock_out, "does not let"),
        (swap_key, "its host key has CHANGED"),
        (take_tmux, "tmux is missing; install it: sudo apt-get install tmux"),
        (break_probe, "the shared folder is away"),
        (take_space, "1 GB free, 2 GB are needed"),
        (break_python, "no pip"),
        (garble_python, "no Python environment was found or made: Segmentation fault"),
        (cut_network, "no route to machine 0"),
    ],
)
def test_what_is_wrong_with_a_machine_is_named_and_nothing_starts(
    rig: Callable[..., Rig], harm: Callable[[Rig], None], reason: str
) -> None:
    one = rig(0, 1)
    harm(one)
    fleet = one.fleet()
    with pytest.raises(SetupFailed) as caught:
        fleet.set_up_machines()
    said = str(caught.value)
    assert reason in said and said.startswith(fleet.connectors["1"].name) and "\n" not in said
    assert list(fleet.setup_progress.failure_reasons) == ["1"] and reason in fleet.setup_progress.failure_reasons["1"]
    kept = json.loads(fleet.setup_progress.path.read_text())
    assert kept["machines"]["1"]["reason"] == fleet.setup_progress.failure_reasons["1"] and not kept["ready"]
    assert not one.calls("cluster.agent")
    assert fleet.terminate() == (["1"] if harm in (lock_out, swap_key) else [])


def test_the_host_key_that_came_and_the_one_that_was_known_are_both_named(rig: Callable[..., Rig]) -> None:
    one = rig(0, 1)
    swap_key(one)
    with pytest.raises(SetupFailed) as caught:
        one.fleet().set_up_machines()
    for machine in one.bed.machines[:2]:
        assert fingerprint(machine.host_key.split()[1]) in str(caught.value)


def test_a_full_disk_is_named(rig: Callable[..., Rig], full_disk: Path) -> None:
    one = rig(0, 1)
    one.change(1, folder=str(full_disk / "folder"))
    with pytest.raises(SetupFailed, match=r"folder/commands cannot be used"):
        one.fleet().set_up_machines()
    assert not one.calls("cluster.agent")


def test_two_machines_that_fail_are_both_named(rig: Callable[..., Rig]) -> None:
    one = rig(0, 1)
    break_python(one)
    one.says("cluster.machines.python_env-0", 'echo \'{"python": null, "why": "too old"}\'; exit 1')
    with pytest.raises(SetupFailed, match=r"^machine 0 .*too old; machine 1 .*no pip$"):
        one.fleet().set_up_machines()


def test_a_spare_may_fail(rig: Callable[..., Rig]) -> None:
    one = rig(0, 1, machines=1, spares=1)
    break_probe(one)
    fleet = one.fleet()
    fleet.set_up_machines()
    assert (
        fleet.setup_progress.data["ready"] and "the shared folder is away" in fleet.setup_progress.failure_reasons["1"]
    )
    one_call = lambda: one.calls("cluster.agent") == ["0"]
    deadline = time.monotonic() + 20
    while not one_call():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not one.calls("train.distributed.network_probe") and fleet.agents_alive() and fleet.dead_machines() == []


def test_machines_that_are_set_up_are_left_as_they_are(rig: Callable[..., Rig], place: Any) -> None:
    one = rig(0, 1)
    fleet = one.fleet()
    fleet.set_up_machines()
    assert {*fleet.setup_progress.rows["1"]["seconds"]} == {
        "connected",
        "code",
        "environment",
        "checks",
        "network",
        "agent",
    }
    fleet.set_up_machines()
    Fleet(fleet.spec, fleet.folders).set_up_machines()
    place.wait_for(lambda: one.calls("cluster.agent") == ["0", "1"], 20)
    assert one.calls("cluster.machines.python_env") == ["0", "1"] and one.calls("cluster.machines.probe") == [
        "0",
        "0",
        "1",
        "1",
    ]


# --- the supervisor ------------------------------------------------------------------------------------------------


class Launched:
    """A job that the installed command has launched, held up in one part of its set-up on machine 0."""

    def __init__(self, place: Any, bed: Testbed, held: str) -> None:
        self.place, self.bed = place, bed
        for one in bed.machines:
            shutil.rmtree(one.home / ".imgnet", ignore_errors=True)
        self.stub = replace(QUICK, count=2).write_script(place.path / "python")
        (place.path / "python.d").mkdir()
        self.hold = place.path / "python.d" / "hold"
        self.hold.touch()
        lines = f'while [ -e "{self.hold}" ]; do sleep 0.05; done'
        (place.path / "python.d" / f"{held}-0").write_text(lines)
        (place.path / "recipe.py").write_text(RECIPE)
        hosts = bed.write_hosts_toml(place.path / "hosts.toml", count=2, python=str(self.stub))
        ran = place.cli("launch", "--hosts", str(hosts), "-y", "-d", "recipe.py")
        assert ran.code == 0, ran
        self.job, self.log = place.job(), place.path / "python.log"
        place.wait_for(lambda: self.log.exists() and f"{held} 0\n" in self.log.read_text(), 30)

    def agents(self) -> int:
        """How many agents are at work: those that hold a lock."""
        locks = [one.home / ".imgnet" / "jobs" / self.job.spec.uid / "agent.lock" for one in self.bed.machines[:2]]
        inodes = {str(path.stat().st_ino) for path in locks if path.exists()}
        lines = Path("/proc/locks").read_text().splitlines()
        held = {line.split()[5].split(":")[2] for line in lines if "->" not in line}  # not those who wait for one
        return len(inodes & held)

    def states(self) -> list[str]:
        return [one["state"] for one in self.job.machine_details().values()]


@pytest.fixture
def launched(place: Any, bed: Testbed) -> Iterator[Callable[[str], Launched]]:
    """Launch a job that is held up: launched("cluster.machines.probe")."""
    yield lambda held: Launched(place, bed, held)
    for one in bed.machines:
        if one.left():  # the test has failed: the next shall not
            one.power_off()
            one.boot()


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "part",
    ["cluster.machines.python_env", "cluster.machines.probe", "train.distributed.network_probe", "cluster.agent"],
)
def test_a_supervisor_that_is_killed_is_followed_by_one_that_finishes(
    place: Any, bed: Testbed, launched: Callable[[str], Launched], part: str
) -> None:
    one = launched(part)
    (pid,) = supervisor_pids(one.job.path)
    os.kill(pid, signal.SIGKILL)
    place.wait_for(lambda: not supervisor_pids(one.job.path) and "job-1" not in place.tmux("ls"), 20)
    one.hold.unlink()
    one.job.refresh()  # as any command that looks
    place.wait_for(lambda: one.states() == ["training", "training"], 30)
    assert one.agents() == 2 and len(supervisor_pids(one.job.path)) == 1
    assert [path.name for path in one.job.run_folder.shared.glob("attempts/*")] == ["000001.json"]
    assert place.cli("stop", "job-1").code == 0
    assert one.job.state == "stopped" and one.agents() == 0
    place.wait_for(lambda: not bed.leaks(), 20)


@pytest.mark.parametrize("part", ["cluster.machines.python_env", "train.distributed.network_probe"])
def test_a_job_is_stopped_while_it_is_set_up(
    place: Any, bed: Testbed, launched: Callable[[str], Launched], part: str
) -> None:
    one = launched(part)
    start = time.monotonic()
    ran = place.cli("stop", "job-1")
    one.hold.unlink()
    assert ran.code == 0 and time.monotonic() - start < 30
    assert one.job.has_ended and "stopped by the user" in one.job.result["reason"]
    assert "cluster.agent" not in one.log.read_text()
    place.wait_for(lambda: not (bed.leaks() or supervisor_pids(one.job.path)), 20)


def test_a_launch_that_fails_says_why_and_leaves_nothing(place: Any, bed: Testbed) -> None:
    stub = QUICK.write_script(place.path / "python")
    (place.path / "python.d").mkdir()
    (place.path / "python.d" / "cluster.machines.probe-1").write_text("free=1")
    (place.path / "recipe.py").write_text(RECIPE)
    hosts = bed.write_hosts_toml(place.path / "hosts.toml", count=2, python=str(stub))
    ran = place.cli("launch", "--hosts", str(hosts), "-y", "recipe.py")
    assert ran.code == 100 and "machine 1 (127.1.0.2)" in ran.out and "1 GB free, 2 GB are needed" in ran.out, ran
    assert "failed" in place.cli("ls").out
    place.wait_for(lambda: not (bed.leaks() or supervisor_pids(place.job().path)), 20)
