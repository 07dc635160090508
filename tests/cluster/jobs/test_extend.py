"""`extend`: a job gets more hours or dollars. What its machines and its run folder have then, and what is refused."""

import json
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner
from support.toy_cloud import ToyBackend, ToyCloud

from cluster.backends import catalog
from cluster.backends.aws.renting.instances import JobInstances
from cluster.backends.local import LocalBackend
from cluster.cli import cloud
from cluster.connectors.hosts_file import Hosts
from cluster.errors import BadInput, ClusterError
from cluster.jobs import billing, store
from cluster.state.result import write_result
from cluster.state.run_folder import Run
from cluster.state.spec import JobSpec
from cluster.state.states import JobState

HOUR = 3600.0
RATE = 6.0  # dollars an hour
DOLLARS_LIMIT = "the limit of ${:.2f} (--max-price-total)"


class PricedCloud(ToyCloud):
    """The toy cloud with a price. The job has been running for half an hour and has cost 3 dollars."""

    dollars_per_hour: Any = RATE
    max_dollars: Any = JobInstances.max_dollars
    expiry_times: ClassVar[list[float]] = []

    def total_dollars(self, moment: float) -> float:
        return RATE * max(0.0, moment - (self.first_time or moment)) / HOUR

    def set_expiry(self, expiry_time: float) -> None:
        self.expiry_times.append(expiry_time)


class Machine:
    """A machine of which only the commands and files that `extend` sends are known."""

    def __init__(self) -> None:
        self.poweroff_seconds = 0.0
        self.files: dict[str, Any] = {}
        self.error = ""

    def run(self, argv: list[str], timeout: float) -> None:
        if self.error:
            raise ClusterError(self.error)
        assert argv[:3] == ["sudo", "-n", "imgnet-limit"]
        self.poweroff_seconds = float(argv[3])

    def write(self, path: str, content: bytes) -> None:
        self.files[path] = json.loads(content)


class RunningJob:
    """A job on two machines with limits of 2 hours and 9 dollars, which has been running for half an hour."""

    def __init__(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = run
        self.folder = run.run_folder
        self.machines = {"0": Machine(), "1": Machine()}
        self.fleet: Any = SimpleNamespace(
            connectors=self.machines,
            setup_progress=SimpleNamespace(rows={n: SimpleNamespace(work=f"/work/{n}", reason="") for n in "01"}),
            provisioner=SimpleNamespace(job_folder=lambda name: "/shared/job"),
            close=lambda: None,
        )
        monkeypatch.setattr(ToyBackend, "provider_class", PricedCloud)
        monkeypatch.setattr(ToyBackend, "open_fleet", lambda _: self.fleet)
        monkeypatch.setattr(catalog, "open_backend", ToyBackend)
        PricedCloud.reset(free_machines=2)
        PricedCloud.expiry_times.clear()
        PricedCloud.first_time = time.time() - HOUR / 2

    def end(self, state: JobState) -> None:
        run = Run(self.run.spec, self.folder)
        write_result(run, ToyBackend(run), end_reason="spent", end_state=state)

    def extend(self, hours: float | None = None, dollars: float | None = None) -> float | None:
        return billing.extend(self.run.job, hours, dollars)

    @property
    def written(self) -> JobSpec:
        return Run.read(self.folder.path).spec

    @property
    def shared(self) -> JobSpec:
        sent = self.machines["0"].files["/shared/job/job.json"]
        assert sent == json.loads((self.folder.shared / "job.json").read_text())
        return JobSpec.from_json(sent)

    def limits(self) -> list[dict[str, Any]]:
        return [machine.files.get(f"/work/{name}/limit", {}) for name, machine in self.machines.items()]


@pytest.fixture
def job(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> RunningJob:
    run = hand_made(machines=2, backend="toy", cloud={"max_dollars": 9.0}, hosts=Hosts(None, ()), max_hours=2.0)
    return RunningJob(run, monkeypatch)


def test_more_dollars_give_the_machines_more_time(job: RunningJob) -> None:
    """9 dollars pay for 1.5 hours of which a part is for saving; with 12 dollars it is 2 hours."""
    hours = job.extend(dollars=12.0)
    assert hours is not None and 1.5 < hours < 2.0
    assert job.limits() == [{"hours": hours, "name": DOLLARS_LIMIT.format(12)}] * 2
    for machine in job.machines.values():
        assert machine.poweroff_seconds == pytest.approx(1.5 * HOUR, abs=5), "12 dollars last for 2 hours in all"
    assert job.written.rental_facts.max_dollars == 12.0 and job.written.max_hours == 2.0
    assert job.shared.max_hours == hours and job.shared.limit_name == DOLLARS_LIMIT.format(12)
    assert job.shared.rental_facts.max_dollars == 12.0
    assert PricedCloud.expiry_times == [pytest.approx(time.time() + 1.5 * HOUR, abs=5)]
    provider = PricedCloud(job.run.spec, job.folder)
    assert provider.max_dollars == 12.0, "a supervisor that has been at work since before takes the new limit"
    assert provider.compute_limits(RATE)[0] == pytest.approx(hours)


def test_limit_in_dollars_can_be_set_where_there_was_none(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = hand_made(machines=2, backend="toy", cloud={}, hosts=Hosts(None, ()), max_hours=2.0)
    job = RunningJob(run, monkeypatch)
    hours = job.extend(dollars=6.0)
    assert hours is not None and hours < 1.0 and job.shared.limit_name == DOLLARS_LIMIT.format(6)


def test_machine_that_does_not_take_the_limit_is_named_and_nothing_is_promised(job: RunningJob) -> None:
    job.machines["1"].error = "machine 1: does not answer"
    with pytest.raises(ClusterError, match=r"did not get the new limit: machine 1: .*; run the command again"):
        job.extend(dollars=12.0)
    assert job.written.rental_facts.max_dollars == 9.0, "the supervisor stops the job at the old limit"


@pytest.mark.parametrize(("rate", "limits", "message"), [
    (RATE, {"dollars": 2.5}, r"^--max-price-total 2.5: job-1 has cost \$3.* already; pass more$"),
    (RATE, {"dollars": 3.01},
     r"^job-1 has been running for more than 0.3\d* hours, all that the limit of \$3.01 .* allows;"),
    (RATE, {"hours": 3.0},
     r"^--max-hours 3: the limit of \$9.00 \(--max-price-total\) allows only 1.\d+ hours$"),
    (RATE, {"hours": 0.1},
     r"^job-1 has been running for more than 0.1 hours; to stop it: imgnet-cluster stop job-1$"),
    (None, {"dollars": 12.0}, "the price of the machines of job-1 is unknown, .*: --max-hours$"),
])  # fmt: skip
def test_limit_that_is_over_unknown_or_contradicts_the_other_is_refused(
    job: RunningJob, monkeypatch: pytest.MonkeyPatch, rate: float | None, limits: dict[str, float], message: str
) -> None:
    monkeypatch.setattr(PricedCloud, "dollars_per_hour", rate)
    before = job.folder.spec_path.read_bytes()
    with pytest.raises(BadInput, match=message):
        job.extend(**limits)
    assert job.folder.spec_path.read_bytes() == before and job.limits() == [{}, {}]


def test_job_that_is_done_or_has_no_rented_machines_is_refused(job: RunningJob, hand_made: Any) -> None:
    local = r"^job-2 has no rented machines: it runs on this computer; to change its time .* resume job-2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "open_backend", LocalBackend)
        with pytest.raises(ClusterError, match=local):
            billing.extend(hand_made("job-2").job, dollars=12.0)
    job.end(JobState.DONE)
    with pytest.raises(ClusterError, match=r"^job-1 is done: no machines are running"):
        job.extend(dollars=12.0)


def test_command_says_what_the_job_may_cost_and_take(job: RunningJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requested hours count where dollars abound; a job that has stopped gets dollars before it is resumed."""
    monkeypatch.setattr(store, "find", lambda name: job.run.job)
    runner = CliRunner()

    def run(*arguments: str) -> str:
        result = runner.invoke(cloud.extend, ["job-1", *arguments], standalone_mode=False)
        if result.exception:
            raise result.exception
        return result.output

    with pytest.raises(ClusterError, match=r"^let job-1 run for 3 hours instead of 75 minutes, for at most \$19.50"):
        run("--max-price-total", "100", "--max-hours", "3")
    assert job.written.max_hours == 2.0 and job.limits() == [{}, {}], "nobody was asked"
    for arguments, hours in ((), 2.0), (("--max-hours", "3"), 3.0):
        answer = run("-y", "--max-price-total", "100", *arguments)
        assert answer == f"job-1 may cost $100.00 and take {hours:g} hours\n"
        assert (job.written.max_hours, job.written.rental_facts.max_dollars) == (hours, 100.0)
        assert (job.shared.max_hours, job.shared.limit_name) == (hours, "")
        assert job.limits() == [{"hours": hours, "name": ""}] * 2
    assert run("--max-hours", "2.5") == "job-1 may take 2.5 hours\n"
    with pytest.raises(BadInput, match="give a limit: --max-hours HOURS, --max-price-total DOLLARS, or both"):
        run()
    job.end(JobState.STOPPED)
    assert run("--max-price-total", "120") == "job-1 may cost $120.00\n  continue     imgnet-cluster resume job-1\n"
    assert PricedCloud(job.run.spec, job.folder).max_dollars == job.written.rental_facts.max_dollars == 120.0
    with pytest.raises(BadInput, match=r"has cost \$3.* already"):
        run("--max-price-total", "2")
    with pytest.raises(ClusterError, match=r"^job-1 is stopped: no machines are running; see: imgnet-cluster status"):
        run("--max-hours", "3")
