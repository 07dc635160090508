"""`check --ssh` over the real sshd of the testbed: it finds faults and leaves nothing on the machines.

A shell script stands for Python there, except where the checks themselves are tested.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ssh_machines import Testbed

from benchmarks.launch.stub import RECIPE


class Checker:
    """A user who checks the machines of a testbed, and the script that is their Python."""

    def __init__(self, sandbox: Any, bed: Testbed, stub: Any) -> None:
        self.sandbox, self.bed, self.stub = sandbox, bed, stub
        self.hosts = self.write_hosts(python=str(stub.path))

    def write_hosts(self, count: int = 3, **keys: Any) -> Path:
        return self.bed.write_hosts_toml(self.sandbox.path / "hosts.toml", count=count, **keys)

    def run(self, *options: object) -> Any:
        """Run the check, and compare the machines' files before and after it."""
        before = self.files()
        ran = self.sandbox.cli("check", "--ssh", self.hosts, *options)
        assert self.files() == before
        assert not self.bed.leaks()
        return ran

    def files(self) -> list[str]:
        roots = [*(machine.home for machine in self.bed.machines), self.bed.shared]
        return sorted(str(path) for root in roots for path in root.rglob("*"))


@pytest.fixture
def checker(sandbox: Any, bed: Testbed, make_stub: Callable[..., Any]) -> Checker:
    return Checker(sandbox, bed, make_stub(sandbox.path))


def test_check_of_good_machines_shows_a_row_for_each(checker: Checker) -> None:
    made_before = checker.bed.machines[0].home / ".imgnet"  # empty, as an administrator may have made it
    made_before.mkdir()
    answer = f'{{"python": "{checker.stub.path}", "seconds": 0, "missing": ["torch>=2.9"], "why": "lacks"}}'
    checker.stub.override(
        "cluster.machines.python_env-0",
        f"""echo "$*" >{checker.sandbox.path}/arguments; echo '{answer}'; """
        'while [ "$1" != --then ]; do shift; done; shift; exec "$stub" -m "$@"',
    )
    ran = checker.run()
    assert ran.code == 0 and made_before.is_dir(), ran
    rows = [line.split() for line in ran.out.splitlines() if line.split()[1:2] and line.split()[1].startswith("127.")]
    assert [row[:3] for row in rows] == [[str(number), f"127.1.0.{number + 1}", "warning"] for number in range(3)]
    assert "warning  machines 0, 1, 2: no GPU: trains on the CPU" in ran.out
    assert "machine 0 (127.1.0.1): its Python lacks torch>=2.9; a launch installs them" in ran.out
    assert ran.out.endswith("\nall machines can be used\n")
    assert checker.stub.calls("cluster.machines.probe") and not checker.stub.calls("cluster.agent")
    assert (checker.sandbox.path / "arguments").read_text().startswith("--find ")


def test_check_names_each_fault_with_its_machine_and_folds_equal_ones(checker: Checker) -> None:
    text = checker.hosts.read_text()
    checker.hosts.write_text(text.replace(f'"127.1.0.2"\nport = {checker.bed.machines[1].port}', '"127.1.0.2:1"'))
    for machine in (0, 2):
        checker.stub.override(
            f"cluster.machines.python_env-{machine}", """echo '{"python": "", "why": "no pip"}'; exit 1"""
        )
    ran = checker.run()
    assert ran.code == 1 and "3 of the 3 machines cannot be used" in ran.err
    errors = [line for line in ran.out.splitlines() if line.startswith("error ")]
    assert errors[0] == "error    machines 0, 2: no pip" and len(errors) == 2
    assert errors[1].startswith("error    machine 1 (127.1.0.2): cannot be reached at 127.1.0.2 port 1: Connection ref")
    reports = json.loads(checker.run("-o", "json").out)
    assert [report["facts"] for report in reports] == [None] * 3 and all(report["errors"] for report in reports)


def test_check_with_the_real_checks_finds_a_wrong_data_folder(checker: Checker) -> None:
    checker.hosts = checker.write_hosts(count=2, python=sys.executable)
    data = checker.sandbox.path / "images"
    (data / "train/cat").mkdir(parents=True)
    ran = checker.run("--data", data)
    assert ran.code == 1 and f"error    machines 0, 1: {data}: has no val/" in ran.out, ran


def test_dry_run_asks_the_machines(checker: Checker) -> None:
    checker.stub.override("cluster.machines.probe-1", "free=1")
    recipe = checker.sandbox.path / "recipe.py"
    recipe.write_text(RECIPE)
    before = checker.files()
    ran = checker.sandbox.cli("launch", "--dry-run", "--ssh", checker.hosts, recipe)
    assert ran.code == 1 and "1 GB free, 2 GB are needed" in ran.out, ran
    assert ran.err.endswith("error: a launch would fail: 2 of the 3 machines that it needs can be used\n")
    enough = checker.sandbox.cli("launch", "--dry-run", "--ssh", checker.hosts, "--machines", "1", recipe)
    assert enough.code == 0 and "nothing was started" in enough.out and "127.1.0.2" not in enough.out, enough
    assert checker.files() == before and not (checker.sandbox.path / "runs").exists()


def test_check_of_own_machines_refuses_options_for_aws(checker: Checker) -> None:
    for options in (("--iam",), ("--type", "p4d.24xlarge"), ("--region", "us-east-1")):
        ran = checker.sandbox.cli("check", "--ssh", checker.hosts, *options)
        assert (ran.code, ran.err) == (2, "error: --ssh checks your own machines; leave out the options for AWS\n")
