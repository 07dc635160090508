"""Defaults of options: command line, environment, configuration file, built-in; what `config` and `--help` say."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.checks import check
from cluster.cli.cloud import gc
from cluster.cli.launch import launch, resume
from cluster.cli.options import configured_options, typed_options
from cluster.cli.plan import plan
from cluster.errors import BadInput
from cluster.planning.config_file import config_path
from cluster.planning.launch_options import add_configured

WriteConfig = Callable[[str], Path]


@pytest.fixture
def write_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteConfig:
    """Write the configuration file and return its path."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config/imgnet-cluster/config.toml"

    def write(text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert config_path() == path
        return path

    return write


def launch_keywords(*argv: str) -> tuple[str, dict[str, Any]]:
    with launch.make_context("launch", [*argv, "x.py"]) as context:
        options = {name: value for name, value in context.params.items() if name != "recipe"}
        return add_configured(typed_options(options), configured_options(options), "aws")


def test_command_line_comes_before_environment_before_file(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(
        'region = ["eu-west-1", "eu-north-1"]\ntype = "p4d.24xlarge"\nmax-hours = 4\non-demand = true\n'
        "no-group = true\nstandby = false\nspot = false\n"
    )
    configured = {
        "regions": ("eu-west-1", "eu-north-1"), "types": ("p4d.24xlarge",), "max_hours": 4.0, "market": "on-demand",
        "use_placement_group": False, "standby": False,
    }  # fmt: skip
    assert launch_keywords() == ("aws", configured)
    monkeypatch.setenv("IMGNET_MAX_HOURS", "5")
    monkeypatch.setenv("IMGNET_TYPE", "p5.48xlarge g6.xlarge")
    monkeypatch.setenv("IMGNET_SPOT", "1")
    monkeypatch.setenv("IMGNET_NO_GROUP", "0")
    by_environment = {
        "max_hours": 5.0, "types": ("p5.48xlarge", "g6.xlarge"), "market": "spot", "use_placement_group": True,
    }  # fmt: skip
    assert launch_keywords() == ("aws", configured | by_environment)
    typed = {"max_hours": 6.0, "market": "spot-then-on-demand", "standby": True}
    typed_argv = ("--max-hours", "6", "--spot-then-on-demand", "--standby")
    assert launch_keywords(*typed_argv) == ("aws", configured | by_environment | typed)


def test_options_of_other_backends_do_not_count(write_config: WriteConfig) -> None:
    write_config('region = "eu-west-1"\nmax-hours = 4\nslurm = true\npartition = "gpu"')
    assert launch_keywords() == ("slurm", {"max_hours": 4.0, "partition": "gpu"})
    assert launch_keywords("--local") == ("local", {"max_hours": 4.0})
    assert launch_keywords("--aws", "--region", "us-east-1") == ("aws", {"max_hours": 4.0, "regions": ("us-east-1",)})
    write_config('ssh = "hosts.toml"')
    assert launch_keywords() == ("ssh", {"hosts": "hosts.toml"})
    assert launch_keywords("--local") == ("local", {})


def test_other_commands_take_the_same_defaults_but_resume_does_not(write_config: WriteConfig) -> None:
    write_config('region = ["eu-west-1", "eu-north-1"]\ntype = "p4d.24xlarge"\nmax-hours = 4\nseed = 3')
    assert check.make_context("check", []).params["region"] == "eu-west-1"
    assert gc.make_context("gc", []).params["regions"] == ("eu-west-1", "eu-north-1")
    params = plan.make_context("plan", ["x.py"]).params
    assert params["types"] == ("p4d.24xlarge",) and params["seed"] == 3
    params = resume.make_context("resume", ["job-1"]).params
    assert params["max_hours"] is None and params["types"] == ()
    help_text = resume.get_help(resume.make_context("resume", ["job-1"]))
    assert "[default" not in help_text and "--max-hours HOURS" in help_text, "the job keeps its values"


@pytest.mark.parametrize(("text", "message"), [
    ("max-hour = 4", "max-hour: is no option of a launch that can be set here; did you mean max-hours?"),
    ('max-hours = "4"', "max-hours: '4' is a string, not a number; leave out the quotes."),
    ("max-hours = -1", "max-hours: -1.0 is not in the range 0<x<=100000."),
    ("region = 3", "region: 3 is not a valid str."),
    ("on-demand = 'yes'", "on-demand: 'yes' is not true or false."),
    ("on-demand = true\nspot = true", "spot: it excludes on-demand; leave one of them out."),
    ("[launch]\nmachines = 2", "launch: is a table; the file has no tables"),
    ("region = ?", "Invalid value (at line 1, column 10)"),
])  # fmt: skip
def test_wrong_line_is_named_with_its_file(write_config: WriteConfig, text: str, message: str) -> None:
    path = write_config(text)
    with pytest.raises(BadInput) as caught:
        launch_keywords()
    assert str(caught.value).startswith(f"{path}: {message}") and "\n" not in str(caught.value)


def test_config_and_help_show_value_and_source(sandbox: Any, write_config: WriteConfig) -> None:
    path = write_config('region = "eu-west-1"\non-demand = true\nnotify = "http://127.0.0.1:1/T000/s3cr3t"')
    env = {"XDG_CONFIG_HOME": str(path.parents[1]), "IMGNET_MAX_HOURS": "5"}
    shown = json.loads(sandbox.cli("config", "-o", "json", env=env).out)
    rows = {row["option"]: (row["value"], row["source"]) for row in shown["options"]}
    assert shown["file"] == str(path)
    assert rows["region"] == ("eu-west-1", str(path)) and rows["on-demand"] == ("yes", str(path))
    assert rows["max-hours"] == ("5", "IMGNET_MAX_HOURS") and rows["save-seconds"] == ("30.0", "default")
    assert rows["spot"] == rows["machines"] == rows["local"] == ("", "default")
    assert rows["no-group"] == ("no", "default"), "the group is used"
    table = sandbox.cli("config", env=env)
    assert table.code == 0 and "IMGNET_MAX_HOURS" in table.out and f"configuration file: {path}" in table.out
    text = "".join(sandbox.cli("launch", "--help", env=env).out.split())
    assert "[IMGNET_MAX_HOURS:5]" in text and f"[{path}:eu-west-1]" in text and text.count(f"[{path}:") == 3
    assert f"[{path}:http://127.0.0.1:1/...]" in text and "s3cr3t" not in text + table.out


def test_wrong_line_refuses_only_commands_that_start_or_create(sandbox: Any, write_config: WriteConfig) -> None:
    path = write_config('bad = 1\nregion = "eu-west-1"')
    env = {"XDG_CONFIG_HOME": str(path.parents[1])}
    fault = f"{path}: bad: is no option of a launch that can be set here"
    for tolerant in (["launch", "--help"], ["ls"], ["down", "job-7"]):  # there is no such job, and no cloud
        ran = sandbox.cli(*tolerant, env=env)
        assert ran.err.startswith(f"warning: {fault}") and "does not count here\n" in ran.err, ran
        assert bool(ran.code) == (tolerant[0] == "down"), ran
    listed = sandbox.cli("config", "-o", "json", env=env)
    rows = {row["option"]: row["value"] for row in json.loads(listed.out)["options"]}
    assert listed.code == 0 and rows["region"] == "eu-west-1" and fault in listed.err
    for refused in (["launch", "x.py"], ["up", "--stack"], ["down", "--stack", "-y"]):
        ran = sandbox.cli(*refused, env=env)
        assert ran.code == 2 and f"error: {fault}" in ran.err
    path.write_text("region = ?")
    assert sandbox.cli("ls", env=env).code == 0


@pytest.mark.parametrize(("argv", "asks"), [
    ((), "ssh hosts.toml"), (("--ssh", "other.toml"), "ssh other.toml"), (("--type", "p5.48xlarge"), "cloud"),
])  # fmt: skip
def test_check_takes_ssh_from_the_file(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], asks: str
) -> None:
    write_config('ssh = "hosts.toml"\nregion = "eu-west-1"\ntype = "p4d.24xlarge"')
    asked: list[str] = []

    def open_cloud() -> None:
        asked.append("cloud")
        raise BadInput("no cloud here")

    monkeypatch.setattr("cluster.cli.checks.open_cloud", open_cloud)
    monkeypatch.setattr("cluster.cli.checks._check_hosts", lambda hosts, *_: asked.append(f"ssh {hosts}"))
    with contextlib.suppress(BadInput):
        check.main(list(argv), "check", standalone_mode=False)
    assert asked == [asks]
