from typing import Any

import pytest
from support.aws_stack import Seen, account, aws, home, work

from infra.aws.errors import CloudError
from infra.aws.stack import resources
from infra.aws.stack.resources import StackContext

__all__ = ["account", "aws", "home", "work"]


def one(id: str, used: bool = False) -> dict[str, Any]:
    return {"Id": id, "used": used}


def agreed(
    work: StackContext, there: list[dict[str, Any]], later: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> str:
    """What is agreed on when others come while one waits."""
    monkeypatch.setattr(resources.time, "sleep", lambda _: there.extend(later))
    found = work.ensure_single(
        "thing",
        lambda: list(there),
        lambda: there.append(one("5")),
        there.remove,
        id_key="Id",
        is_used=lambda one: one["used"],
    )
    return str(found["Id"])


@pytest.mark.parametrize(
    "there, later, taken, left",
    [
        ([], [], "5", ["5"]),
        ([], [one("3")], "3", ["3"]),
        ([], [one("7")], "5", ["5"]),
        ([], [one("7", used=True)], "7", ["7"]),
        ([one("4")], [one("3")], "3", ["3"]),  # found idle: whoever made it may not take it
        ([one("4", used=True)], [one("3")], "4", ["4"]),  # in use: nobody is waited for
        ([one("4", used=True), one("2")], [], "4", ["4"]),
        ([one("4", used=True), one("2", used=True)], [], "2", ["4", "2"]),
    ],
)
def test_all_who_look_take_the_one_in_use_else_the_first_by_its_id_and_idle_ones_go(
    work: StackContext, monkeypatch: pytest.MonkeyPatch, there: list[Any], later: list[Any], taken: str, left: list[str]
) -> None:
    there = list(there)
    assert agreed(work, there, later, monkeypatch) == taken
    assert [each["Id"] for each in there] == left


def test_what_was_made_and_is_never_shown_is_said(work: StackContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "RESOURCE_VISIBILITY_SECONDS", 0.05)
    with pytest.raises(CloudError, match=r"thing was made, and AWS does not show it .*type it again"):
        work.ensure_single("thing", list, lambda: None, lambda _: None, id_key="Id", is_used=lambda _: False)


def test_what_stays_is_kept_as_a_line_and_what_is_gone_is_no_matter(account: Seen, work: StackContext) -> None:
    assert work.delete("subnet", account.ec2.delete_subnet, SubnetId="subnet-12345678") and not work.leftovers
    account.deny = {"DeleteSubnet": "UnauthorizedOperation"}
    assert not work.delete("subnet", account.ec2.delete_subnet, SubnetId="subnet-12345678")
    assert work.leftovers == ["subnet stays: not permitted (no); the least policy: imgnet-cluster check --iam"]
