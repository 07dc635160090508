"""Every backend keeps the contract of `Backend`; other packages can register backends of their own."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.backend_contract import *  # noqa: F403

from cluster.backends import catalog
from cluster.backends.local import LocalBackend
from cluster.cli.launch import launch
from cluster.connectors.hosts_file import Hosts
from cluster.errors import BadInput
from cluster.planning.launch_options import choose_backend, make_launch_options
from cluster.state.run_folder import Run

PROCESS = "support.process_backend:ProcessBackend"


@pytest.fixture(params=[*sorted(catalog.BUILTIN_BACKENDS), "process"])
def backend_run(hand_made: Any, request: pytest.FixtureRequest, register: Any) -> Run:
    """The run of a job that was never started, on each backend, the example of the documentation among them."""
    register("process", PROCESS)
    is_remote = catalog.backend_class(request.param).is_remote
    run = hand_made(backend=request.param, hosts=Hosts("/nowhere", ()) if is_remote else None)
    return Run(run.spec, run.run_folder)


@pytest.mark.parametrize("name", ["cloud", "", "../local"])
def test_backend_class_unknown_name_is_refused(name: str, hand_made: Any) -> None:
    with pytest.raises(BadInput, match=r"no backend .*; the backends are .*local"):
        catalog.backend_class(name)
    run = hand_made(backend=name)
    with pytest.raises(BadInput, match=f"^{run.run_folder.spec_path}: no backend '{name}'"):
        _ = run.job.backend


PLUG_IN = """
from cluster.backends.local import LocalBackend
from cluster.cli.launch import launch
from cluster.backends.base import Backend
from cluster.backends.backend_options import BackendOptions
from dataclasses import dataclass
from train.tools.option_fields import option_field

@dataclass(frozen=True, kw_only=True)
class PodOptions(BackendOptions):
    image: str | None = option_field(None, "--pod", metavar="IMAGE", group="Machines", help="Train in pods.")

class PodBackend(LocalBackend):
    "A backend that is chosen by a value."
    name = "pod"
    options = PodOptions

class HalfBackend(Backend):
    "A backend without methods."
    name = "half"

@dataclass(frozen=True, kw_only=True)
class ClashingOptions(BackendOptions):
    type: str | None = option_field(None, metavar="TYPE", group="Other", help="A flag of another backend.")

class ClashingBackend(LocalBackend):
    "A backend with a flag of another."
    name = "other"
    options = ClashingOptions

not_a_class = 3
"""


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register an entry point of a package that is not part of this project."""
    (tmp_path / "plug_in_package.py").write_text(PLUG_IN)
    (tmp_path / "broken_package.py").write_text("import a_library_that_is_missing")
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name: str, value: str) -> None:
        entry = EntryPoint(name, value, catalog.ENTRY_POINT_GROUP)
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == entry.group else [])
        catalog._sort_backends.cache_clear()

    yield add
    catalog._sort_backends.cache_clear()


def test_builtin_backend_cannot_be_replaced(register: Any) -> None:
    register("local", PROCESS)
    assert catalog.backend_class("local") is LocalBackend


@pytest.mark.parametrize(("value", "message"), [
    ("broken_package:Any", "a_library_that_is_missing.*repair or uninstall"),
    ("plug_in_package:Missing", "Missing.*repair or uninstall"),
    ("plug_in_package:not_a_class", "arg 1 must be a class"),
    ("plug_in_package:HalfBackend", r"it does not implement agents_alive, attach_command"),
])  # fmt: skip
def test_unusable_registered_backend_is_one_line(register: Any, hand_made: Any, value: str, message: str) -> None:
    register("other", value)
    with pytest.raises(BadInput, match=message) as failure:
        _ = hand_made(backend="other").job.backend
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(("value", "reason"), [
    ("broken_package:Any", "the backend other (broken_package:Any) cannot be used: Module"),
    ("plug_in_package:ClashingBackend", "the backend other has the flag --type, which the backend aws"),
])  # fmt: skip
def test_launch_on_an_unusable_backend_says_why(register: Any, value: str, reason: str) -> None:
    register("other", value)
    printed = CliRunner().invoke(launch, ["--other", "recipes/quickstart.py"])
    assert printed.exit_code == 2 and f"--other: {reason}" in printed.output.splitlines()[-1]


def test_python_and_command_line_choose_a_registered_backend_alike(register: Any) -> None:
    register("pod", "plug_in_package:PodBackend")
    assert make_launch_options(image="debian").backend == choose_backend({"image": "debian"}, "aws") == "pod"
    assert make_launch_options(on_aws=True).backend == "aws" and make_launch_options(on_aws=False).backend == "local"
    with pytest.raises(BadInput, match=r"^give only one of --slurm and --pod; without any, the job runs on"):
        make_launch_options(image="debian", on_slurm=True)
