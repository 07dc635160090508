"""The options of a launch from Python: the same names, checks and messages as on the command line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.backends.aws.terms.aws_options import AwsOptions
from cluster.backends.backend_options import LocalOptions, SshOptions
from cluster.cli.launch import launch
from cluster.errors import BadInput
from cluster.jobs import submit
from cluster.planning.launch_options import LaunchOptions, make_launch_options
from cluster.state.recovery_options import RecoveryOptions
from train.engine.options import TrainOptions


def test_make_launch_options_nests_keywords() -> None:
    options = make_launch_options(machines=4, data=Path("images"), log_ids=True, spares=1, standby=False, seed=None)
    expected = LaunchOptions(backend="local", backend_options=LocalOptions(), machines=4, data="images")
    recovery = RecoveryOptions(spares=1, standby=False)
    assert options == replace(expected, train=TrainOptions(log_ids=True), recovery=recovery)
    on_ssh = make_launch_options(hosts="hosts.toml")
    assert (on_ssh.backend, on_ssh.backend_options) == ("ssh", SshOptions(hosts="hosts.toml"))
    on_aws = make_launch_options("aws", types=["p4d.24xlarge"], regions=["us-east-1"], max_dollars=40)
    assert on_aws.backend_options == AwsOptions(types=("p4d.24xlarge",), regions=("us-east-1",), max_dollars=40.0)


@pytest.mark.parametrize(("backend", "keywords", "message"), [
    ("local", {"max_step": 7}, "a launch has no option 'max_step'; did you mean 'max_steps'?"),
    ("local", {"data_source": 1}, "a launch has no option 'data_source'; the options are machines, procs, data, "),
    ("local", {"types": ["p4d.24xlarge"]}, "--type: only for machines rented from AWS, not for --local"),
    ("plan", {"zones": "a"}, "--zone: only for machines rented from AWS, not for a plan"),
    ("aws", {"market": "auction"}, "Invalid value for '--spot' / '--on-demand' / '--spot-then-on-demand': "
     "'auction' is not one of 'spot', 'on-demand', 'spot-then-on-demand'."),
    ("aws", {"max_dollars": 0}, "Invalid value for '--max-price-total': 0.0 is not in the range x>0."),
    ("aws", {"reservation": "p5"}, "Invalid value for '--reservation': 'p5' is neither a reservation (cr-"),
])  # fmt: skip
def test_make_launch_options_refuses(backend: str, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        make_launch_options(backend, **keywords)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("name", "text"), [
    ("max_hours", "1e9"), ("max_hours", "inf"), ("procs", "99999999"),
    ("scale", "1.5"), ("scale", "nan"), ("procs", "0"), ("max_steps", "many"), ("workers", "-1"),
    ("max_hours", "0.0"), ("seed", "9223372036854775808"), ("save_seconds", "-1.0"), ("lost_seconds", "0.5"),
    ("stall_seconds", "4.0"), ("spares", "-1"), ("min_machines", "0"), ("machines", "1.5"), ("target", "top7=1"),
])  # fmt: skip
def test_python_and_command_line_refuse_with_the_same_message(name: str, text: str) -> None:
    with pytest.raises(BadInput) as caught:
        submit.launch("recipes/quickstart.py", **{name: text})
    flag = f"--{name.replace('_', '-')}"
    printed = CliRunner().invoke(launch, ["--local", f"{flag}={text}", "recipes/quickstart.py"])
    assert str(caught.value).startswith(f"Invalid value for '{flag}': ")
    assert printed.exit_code == 2 and printed.output.splitlines()[-1] == f"Error: {caught.value}"
