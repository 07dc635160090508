"""A launch on rented machines that is killed at any of its calls to AWS: nobody pays twice, whatever is typed next.

Of calls in a row that only read, every third one.
"""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.aws_user import NEVER_SECONDS, Renter
from support.sandbox import Sandbox
from support.simcloud.fixture import CloudProcess

from cluster.jobs.job import Job

NEXT_COMMANDS = ("launch", "down", "gc", "ls")
READING_ACTIONS = ("Describe", "Get", "List")  # these change nothing: a kill after one is a kill before the next call
LANES = 3


class Lane(Renter):
    """One of several users who launch at the same time, each on a cloud and in a sandbox of their own.

    Nobody can log in to the machines.
    """

    def __init__(self, sandbox: Sandbox, cloud: CloudProcess) -> None:
        super().__init__(sandbox, cloud)
        cloud.begin()
        cloud.post("set", ssh_delay_seconds=NEVER_SECONDS)
        self.arguments = self.launch_arguments()
        self.other_folder = self.path / "elsewhere"
        self.other_folder.mkdir()
        self.unreached_calls: set[int] = set()

    def run_undisturbed(self, folder: str) -> list[str]:
        """Launch in a folder until the machines are there, and end the job. Returns the calls until then.

        Waits for the end of the supervisor, whose last calls would else be among those of the next launch.
        """
        self.cloud.post("forget_past")
        job = self.launch_in(folder)
        self.wait_for(lambda: self.granted_ids(job))
        calls = self.calls()
        self.run("down", "--all", "-y", cwd=self.path / folder)
        self.wait_for(lambda: not self.supervisor_pids())
        return calls

    def launch_in(self, folder: str) -> Job:
        """Launch in a folder, where the launch may fail. Returns the folder's first job."""
        (self.path / folder).mkdir(exist_ok=True)
        self.cli(*self.arguments, cwd=self.path / folder)
        return Job(self.path / folder / "runs/job-1")

    def launch_and_kill(self, number: int, when: str, next_command: str, action: str = "") -> None:
        """Kill the caller of a call of a launch, run another command, and end the job.

        `number` is the call's, from 1, among those of an action if one is given; `when` is "before" or "after" the
        call. Asserts that there are all machines or none after the command, and none in the end.
        """
        folder = f"{action}{number}-{when}"
        ids_before = self.all_instance_ids()
        kills_before = len(self.cloud.post("killed"))
        self.cloud.post("forget_past")
        self.cloud.post("fault", action=action, kill=True, skip=number - 1, after=when == "after")
        job = self.launch_in(folder)
        self.wait_for(lambda: self.granted_ids(job) or len(self.cloud.post("killed")) > kills_before)
        self.wait_for(lambda: self.granted_ids(job) or not self.supervisor_pids())
        self.cloud.post("no_faults")
        if len(self.cloud.post("killed")) == kills_before:
            # A launch polls as often as its machines take to run: it may come to an end before the call to be killed.
            assert "RunInstances" in self.calls()
            self.unreached_calls.add(number)
            next_command = "down"  # a second launch beside a running job rents machines of its own
        if not job.path.exists() and number % 6:
            # The command itself was killed before there was a job. Of six such cases one runs the next command too.
            beside = self.calls()[number:]  # asked at the same time
            assert self.all_instance_ids() == ids_before and all(each.startswith(READING_ACTIONS) for each in beside)
            return
        cwd = self.other_folder if next_command == "gc" else self.path / folder
        arguments = {
            "launch": self.arguments,
            "down": ("down", "--all", "-y"),
            "gc": ("gc", "--yes", "--unknown"),
            "ls": ("ls",),
        }
        self.run(*arguments[next_command], cwd=cwd)
        if next_command == "launch" or (next_command == "ls" and job.run_folder.spec_path.exists()):
            self.wait_for(lambda: self.granted_ids(job))
            assert len(self.live_instance_ids()) == 2
            assert len(self.sandbox.program_pids("-m cluster.jobs.supervisor")) == 1
            self.run("down", "--all", "-y", cwd=cwd)
        assert self.live_instance_ids() == [] == self.placement_group_ids()
        self.wait_for(lambda: not self.supervisor_pids())
        new_instances = [instance for instance in self.cloud.instances() if instance["id"] not in ids_before]
        launch_ids = {instance["tags"]["imgnet:launch"] for instance in new_instances}
        assert len(new_instances) in (0, 2) and len(launch_ids) < 2, new_instances


def is_among_reads(calls: list[str], number: int) -> bool:
    """Whether a call reads, as those before and after it do. A kill before any of the three leaves the same cloud.

    Only the files that this computer writes between two calls may differ.
    """
    around = calls[max(0, number - 2) : number + 1]
    return len(around) == 3 and all(action.startswith(READING_ACTIONS) for action in around)


@pytest.fixture
def lanes(tmp_path: Path, images: Path) -> Iterator[list[Lane]]:
    lanes = [Lane(Sandbox(tmp_path / f"sandbox{number}", images), CloudProcess()) for number in range(LANES)]
    yield lanes
    with ThreadPoolExecutor() as pool:
        leftovers = [line for lines in pool.map(lambda lane: lane.sandbox.close(), lanes) for line in lines]
        try:
            for lane in lanes:
                lane.cloud.assert_clean()
        finally:
            closed = [pool.submit(lane.cloud.close) for lane in lanes]
    for future in closed:
        future.result()
    assert not leftovers


def test_launch_killed_at_any_call_leaves_all_machines_or_none(lanes: list[Lane]) -> None:
    first_lane, *other_lanes = lanes
    cases: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
    failures: list[str] = []
    with ThreadPoolExecutor(max_workers=2 * LANES) as pool:
        # The other lanes have no stack yet. Each begins with a kill in the middle of creating it.
        begun = {
            lane: pool.submit(lane.launch_and_kill, 1, "after", "launch", action)
            for lane, action in zip(other_lanes, ("CreateVpc", "CreateFileSystem"), strict=True)
        }
        first_lane.run_undisturbed("empty")  # this launch creates the stack, the next one finds it
        calls = first_lane.run_undisturbed("made")
        assert calls.count("RunInstances") == 1 and len(calls) > 30, calls
        assert "DescribeInstances" in calls[calls.index("RunInstances") :], calls
        kills = [
            (number, when)
            for number, action in reversed([*enumerate(calls, 1)])  # `down` waits a minute for an answer that was lost
            if not (number % 3 and is_among_reads(calls, number))
            for when in (("before",) if action.startswith(READING_ACTIONS) else ("before", "after"))
        ]
        for index, (number, when) in enumerate(kills):
            cases.put((number, when, NEXT_COMMANDS[index % len(NEXT_COMMANDS)]))

        def work(lane: Lane) -> None:
            case: tuple[int, str, str] | None = None
            try:
                if lane in begun:
                    begun[lane].result()
                while True:
                    case = cases.get_nowait()
                    lane.launch_and_kill(*case)
            except queue.Empty:
                return
            except BaseException as error:  # pytest's own failures are no subclass of Exception
                failures.append(f"killed {case}, {calls[case[0] - 1] if case else ''}: {error}")

        for lane in lanes:
            pool.submit(work, lane)
    assert not failures, "\n\n".join(failures)
    assert cases.empty()
    unreached_calls = {number for lane in lanes for number in lane.unreached_calls}
    assert min(unreached_calls, default=len(calls)) > calls.index("RunInstances") + 1
