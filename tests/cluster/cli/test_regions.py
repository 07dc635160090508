"""The commands about rented machines: which regions they ask, which job they end, and what they ask before."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.sandbox import Sandbox

from cluster.backends.aws import admin
from cluster.backends.rentals import Garbage
from cluster.cli.app import cli
from cluster.jobs import billing
from cluster.state.states import JobState
from infra.errors import CloudError, NoCredentials


class FakeCloud:
    """A cloud with the jobs of `rented`, by region. `asked` has each region that was asked for jobs or garbage."""

    backend = "aws"

    def __init__(self) -> None:
        self.rented: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.refused: dict[str, CloudError] = {}  # by region
        self.terminated: list[tuple[str, str]] = []
        self.refusal: Exception | None = None

    def resolve_regions(self, requested: Sequence[str]) -> list[str]:
        return list(requested) or ["us-east-1"]

    def regions_of(self, spec: Any) -> set[str]:
        return {place["region"] for place in spec.cloud["places"]}

    def enabled_regions(self, _: str) -> list[str]:
        return ["ap-south-1", "eu-west-1", "us-east-1"]

    def rented_jobs(self, region: str) -> list[Any]:
        if self.refusal:
            raise self.refusal
        self.asked.append(region)
        return [SimpleNamespace(uid=uid, job=uid.rpartition("-")[0]) for uid in self.rented.get(region, [])]

    def find_garbage(self, region: str, *_: Any) -> Garbage:
        self.asked.append(region)
        if region in self.refused:
            raise self.refused[region]
        return Garbage(region=region, remove={}, stay=())

    def terminate_job(self, region: str, uid_or_name: str) -> list[str]:
        self.terminated.append((region, uid_or_name))
        return []


@pytest.fixture
def cloud(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    fake_cloud = FakeCloud()
    monkeypatch.setattr(admin, "AwsAdministration", lambda: fake_cloud)
    monkeypatch.chdir(sandbox.path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(sandbox.path / "config"))
    return fake_cloud


def run(*words: str) -> Result:
    """Run a command in this process, without a terminal."""
    return CliRunner().invoke(cli, words)


def record_ends(monkeypatch: pytest.MonkeyPatch, silent_machines: Sequence[str] = ()) -> list[str]:
    """Return the names of the jobs that are terminated from now on, of which some machines do not answer."""
    ended: list[str] = []

    def terminate_job(job: Any) -> Sequence[str]:
        ended.append(job.name)
        return silent_machines

    monkeypatch.setattr(billing, "terminate_job", terminate_job)
    return ended


def make_ended_job(hand_made: Any, name: str = "job-1") -> None:
    job = hand_made(name, backend="aws", cloud={"places": [{"region": "eu-west-1"}]})
    job.run_folder.result_path.write_text("{}")


@pytest.mark.parametrize("words", [("ls", "--cloud"), ("gc",), ("down", "--all")])
def test_commands_about_all_rented_machines_ask_the_same_regions(
    cloud: FakeCloud, hand_made: Any, words: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ended_job(hand_made)
    for typed, configured, asked in (
        ((), "", {"us-east-1", "eu-west-1", "ap-south-1"}),
        (("--region", "us-west-2"), "", {"us-west-2"}),
        ((), "us-east-2 us-west-1", {"us-east-2", "us-west-1", "eu-west-1", "us-east-1", "ap-south-1"}),
    ):
        monkeypatch.setenv("IMGNET_REGION", configured)
        cloud.asked.clear()
        run(*words, *typed)
        assert sorted(cloud.asked) == sorted(asked)  # each once, at the same time


def test_region_that_nothing_of_ours_names_may_refuse_to_be_asked_and_others_may_not(cloud: FakeCloud) -> None:
    cloud.refused = {"ap-south-1": CloudError("look for machines: not permitted")}
    partly = run("gc")
    assert partly.exit_code == 0 and "nothing to remove in us-east-1, eu-west-1" in partly.output, partly.output
    assert "warning: ap-south-1: could not be asked; look for machines: not permitted" in partly.output
    cloud.refused = {"us-east-1": CloudError("look for machines: not permitted")}
    refused = run("gc")
    assert refused.exit_code == 1 and "nothing to remove" not in refused.output


def test_job_of_another_folder_is_ended_in_the_region_where_it_is_and_only_after_a_yes(
    cloud: FakeCloud, hand_made: Any
) -> None:
    make_ended_job(hand_made)
    uid = "job-7-0123abcd"
    cloud.rented = {"eu-west-1": [uid]}
    refused = run("down", uid)
    assert refused.exit_code == 2 and not cloud.terminated
    assert f"terminate {uid}, with all that it rents in eu-west-1, without saving? There is no" in refused.output
    assert run("down", uid, "-y").exit_code == 0 and cloud.terminated == [("eu-west-1", uid)]
    cloud.rented["us-east-1"] = ["job-7-00000000"]
    ambiguous = run("down", "job-7", "-y")
    assert ambiguous.exit_code == 2 and "found in us-east-1, eu-west-1; give one --region" in ambiguous.output
    assert run("down", "--stack", "--region", "a", "--region", "b").exit_code == 2


def test_down_all_ends_the_jobs_of_this_folder_also_where_the_cloud_cannot_be_asked(
    cloud: FakeCloud, hand_made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = record_ends(monkeypatch)
    hand_made()
    cloud.refusal = NoCredentials("AWS: no credentials")
    asked = run("down", "--all").output
    assert asked.index("were not looked for") < asked.index("terminate job-1 (--local, not rented), without saving?")
    down = run("down", "--all", "-y")
    assert (down.exit_code, ended) == (0, ["job-1"]) and "job-1: gone" in down.output, down.output
    assert "warning: machines of other folders and computers were not looked for: AWS: no cred" in down.output
    assert run("down", "--all", "-y", "--region", "us-east-1").exit_code == 1  # there may be machines
    make_ended_job(hand_made, "job-2")
    refused = run("down", "--all", "-y")
    assert refused.exit_code == 1 and "error: other machines may run; once AWS answers" in refused.output
    assert refused.output.count("no credentials") == 1


def test_down_of_a_job_that_trains_says_what_is_lost_and_needs_a_yes(
    sandbox: Sandbox, hand_made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sandbox.path)
    ended = record_ends(monkeypatch)
    job = hand_made()
    job.write_status("training", step=120, steps=400)
    with job.hold_agent_lock():
        refused = run("down", "job-1")
        assert refused.exit_code == 2 and not ended, refused.output
        text = " ".join(refused.output.split())
        assert "job-1 is running, at step 120 of 400. `down` saves nothing: the steps since its last" in text
        assert "imgnet-cluster stop job-1" in text and "error: terminate job-1 without saving? There is no" in text
        assert run("down", "job-1", "-y").exit_code == 0 and ended == ["job-1"]
    hand_made("job-2").run_folder.result_path.write_text("{}")  # nothing can be lost any more
    run("down", "job-2")
    assert ended == ["job-1", "job-2"]
    acquiring = hand_made("job-3", backend="aws", cloud={"places": []})
    monkeypatch.setattr(type(acquiring.job), "status", lambda _: SimpleNamespace(step=None, state=JobState.ACQUIRING))
    assert run("down", "job-3").exit_code == 0 and ended[-1] == "job-3"  # nothing was trained: no question


@pytest.mark.parametrize("words", [("job-1",), ("--all",)])
def test_down_names_machines_that_did_not_answer(
    cloud: FakeCloud, hand_made: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    record_ends(monkeypatch, silent_machines=("0", "1", "3"))
    hand_made()
    cloud.refusal = NoCredentials("AWS: no credentials")
    down = run("down", "-y", *words)
    told = "machines 0-1, 3 of job-1 did not answer at the end, so processes may still be running there; to end them"
    assert down.exit_code == 0 and told in down.output and "job-1 is gone" not in down.output, down.output
