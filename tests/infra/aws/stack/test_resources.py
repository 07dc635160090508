"""Idempotent create and delete helpers."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.aws_stack import RecordingAccount

from infra.aws.stack import resources
from infra.aws.stack.resources import StackContext
from infra.errors import CloudError


def resource_with(id: str, used: bool = False) -> dict[str, Any]:
    return {"Id": id, "used": used}


def ensure_single_id(
    work: StackContext, existing: list[dict[str, Any]], later: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Return the ID that `ensure_single` takes when `later` appear during its wait."""
    clock = SimpleNamespace(sleep=lambda _: existing.extend(later), monotonic=time.monotonic)
    monkeypatch.setattr(resources, "time", clock)  # not time.sleep: other threads of the process sleep, too
    taken_resource = work.ensure_single(
        "thing",
        lambda: list(existing),
        lambda: existing.append(resource_with("5")),
        lambda Id: existing.remove(resource_with(Id)),
        id_key="Id",
        is_used=lambda resource: resource["used"],
    )
    return str(taken_resource["Id"])


@pytest.mark.parametrize(
    "existing, later, taken, left",
    [
        ([], [], "5", ["5"]),
        ([], [resource_with("3")], "3", ["3"]),
        ([], [resource_with("7")], "5", ["5"]),
        ([], [resource_with("7", used=True)], "7", ["7"]),
        ([resource_with("4")], [resource_with("3")], "3", ["3"]),  # unused: the process that created it may not take it
        ([resource_with("4", used=True)], [resource_with("3")], "4", ["4"]),  # in use: no wait
        ([resource_with("4", used=True), resource_with("2")], [], "4", ["4"]),
        ([resource_with("4", used=True), resource_with("2", used=True)], [], "2", ["4", "2"]),
    ],
)
def test_ensure_single_takes_a_used_or_the_first_and_deletes_idle(
    work: StackContext,
    monkeypatch: pytest.MonkeyPatch,
    existing: list[Any],
    later: list[Any],
    taken: str,
    left: list[str],
) -> None:
    existing = list(existing)
    assert ensure_single_id(work, existing, later, monkeypatch) == taken
    assert [resource["Id"] for resource in existing] == left


def test_ensure_single_reports_an_invisible_resource(work: StackContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "RESOURCE_VISIBILITY_SECONDS", 0.05)
    with pytest.raises(CloudError, match=r"thing was created, but AWS does not show it .*run the same command again"):
        work.ensure_single("thing", list, lambda: None, lambda Id: None, id_key="Id", is_used=lambda _: False)


def test_delete_records_failures_and_ignores_missing_resources(account: RecordingAccount, work: StackContext) -> None:
    assert work.delete("subnet", account.ec2.delete_subnet, SubnetId="subnet-12345678") and not work.leftovers
    account.denied = {"DeleteSubnet": "UnauthorizedOperation"}
    assert not work.delete("subnet", account.ec2.delete_subnet, SubnetId="subnet-12345678")
    assert work.leftovers == ["subnet stays: not permitted (no); print the policy you need: imgnet-cluster check --iam"]
