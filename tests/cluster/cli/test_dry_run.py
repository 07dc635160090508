"""`launch --dry-run` for AWS: a plan that a person reads, with AWS and without it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.aws_user import TYPE, Renter, renter
from support.simcloud.fixture import simcloud

from cluster.display.terminal import clean
from train.tools.files import PROJECT_ROOT

__all__ = ["renter", "simcloud"]  # fixtures

PAGE_LINES = 48  # of a terminal that shows the whole plan
DRY_RUN = ("launch", "--dry-run", "--machines", "16", str(PROJECT_ROOT / "recipes" / "resnet50_18min.py"))


def words(text: str) -> str:
    """Return a text without line breaks, as a sentence that was wrapped is read."""
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("width", "columns"), [(140, ["min scale", "val crop"]), (80, ["min scale", "val crop"]), (60, ["val crop"])]
)
def test_plan_without_aws_is_a_page_that_fits_the_terminal(
    on_terminal: Callable[..., tuple[int, str]], width: int, columns: list[str]
) -> None:
    code, output = on_terminal(*DRY_RUN, COLUMNS=str(width))
    screen = clean(output)
    lines = [line for line in screen.splitlines() if "/runs" not in line]  # the path of a test is long
    assert code == 0 and max(map(len, lines)) <= width, screen
    assert width < 80 or len(screen.splitlines()) <= PAGE_LINES, screen
    assert [name for name in ("min scale", "val crop") if f" {name} " in screen] == columns
    text = words(screen)
    for expected in (
        "the cloud could not be asked: AWS: no region is set",
        "rents 16 x p4d.24xlarge (8 x A100 each), spot: unknown price (on demand $351.32 an hour, us-east-1, 2026)",
        "limits 2 hours; the machines power off 15 minutes later",
        "until power-off, with disks, addresses and expected traffic (at on-demand prices of us-east-1, 2026)",
        "then p5.48xlarge: on demand $880.64 an hour, about 8.63 minutes",
        "internet a public address each, $0.08 an hour; if EC2 refuses, a NAT gateway, $0.055 an hour",
        "network 400 Gbit/s on 4 cards: IP and EFA on card 0, EFA on the others",
        "nothing was started",
    ):
        assert expected in text, (expected, text)
    assert "ec2:RunInstances" not in screen


def test_requests_are_shown_only_when_asked_for(sandbox: Any) -> None:
    ran = sandbox.cli(*DRY_RUN, "--requests")
    assert ran.code == 0 and ran.out.index("shared folder") < ran.out.index("ec2:RunInstances\n{"), ran
    refused = sandbox.cli("launch", "--local", "--requests", sandbox.write_recipe())
    assert (refused.code, refused.err) == (2, "error: --requests needs --dry-run\n")


def test_limit_of_dollars_is_planned_without_a_known_price(sandbox: Any) -> None:
    ran = sandbox.cli(*DRY_RUN, "--max-price-total", "40")
    assert ran.code == 0 and "no place was left out for --max-price-total" in words(ran.out), ran
    assert "(--max-price-total; too little for the whole run at on-demand prices)" in words(ran.out), ran


def test_dry_run_asks_aws_and_rents_nothing(renter: Renter, on_terminal: Callable[..., tuple[int, str]]) -> None:
    code, output = on_terminal(*DRY_RUN, "--spares", "1", "--on-demand-spares", COLUMNS="80")
    screen = clean(output)
    assert code == 0 and len(screen.splitlines()) <= PAGE_LINES and "could not be asked" not in screen, screen
    for expected in (
        "spares 1 of them on demand, $21.96 an hour of it",
        " if spot prices rise to on demand, until power-off, with disks, addresses and expected traffic",
        "zones in order us-east-1b $",
        " an hour each; by EC2's spot score, then price",
        "image ami-",
        "creates network 10.77.0.0/16",
        "file system (EFS",
    ):
        assert expected in words(screen), (expected, screen)
    reserved = {"type": "p4d.24xlarge", "zone": "us-east-1b", "count": 16}
    for details in ({}, {"is_block": True, "end": time.time() + 86_400}):
        id = renter.cloud.post("reserve", **reserved, **details)
        code, output = on_terminal(*DRY_RUN, "--reservation", id, COLUMNS="80")
        assert code == 0 and f"{id}: 16 of 16 machines are free" in words(clean(output)), output
        assert len(clean(output).splitlines()) <= PAGE_LINES, output
    assert not renter.all_instance_ids()
    assert not [name for _, name in renter.cloud.post("calls") if name.startswith(("Run", "Create"))]


@pytest.mark.parametrize("is_reachable", [True, False])
def test_dry_run_says_when_aws_does_not_answer(renter: Renter, is_reachable: bool) -> None:
    environment: dict[str, str] = {} if is_reachable else {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    reason = "not permitted" if is_reachable else "cannot be reached"
    renter.cloud.post("set", policy={"Version": "2012-10-17", "Statement": []})
    recipe = renter.sandbox.write_recipe()
    ran = renter.cli("launch", "--dry-run", "--type", TYPE, recipe, env=environment, timeout=120)
    assert ran.code == 0 and "the cloud could not be asked: " in ran.out and reason in ran.out, ran
    launched = renter.cli("launch", "-y", "--type", TYPE, recipe, env=environment, timeout=120)
    assert launched.code == 1 and reason in launched.err, launched
    assert not (Path(renter.path) / "runs").exists()
