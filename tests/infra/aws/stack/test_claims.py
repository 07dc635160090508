"""Claims: of the computers that adopt a job, the last one supervises it."""

import time

import pytest
from support.aws_stack import RecordingAccount

from infra.aws import tags
from infra.aws.stack import efs
from infra.aws.stack.claims import CLAIM_PREFIX, read_claim, write_claim
from infra.aws.stack.resources import StackContext
from infra.errors import CloudError

UID = "job-3-9073e811"
TOMORROW = time.time() + 86400


@pytest.fixture
def file_system(work: StackContext) -> str:
    """The stack's file system, with a claim on another job that has expired and one that has not."""
    efs.ensure(work, {}, "sg-1")
    description = efs.describe_own(work)
    assert description
    old, other = (f"{'0' * 32} {tags.format_time(TOMORROW - days * 86400)}" for days in (2, 0))
    work.account.efs.tag_resource(
        ResourceId=description["FileSystemId"],
        Tags=tags.to_aws_tags({f"{CLAIM_PREFIX}job-1-00000001": old, f"{CLAIM_PREFIX}job-2-00000002": other}),
    )
    return str(description["FileSystemId"])


def test_last_claim_counts_and_expired_ones_are_removed(account: RecordingAccount, file_system: str) -> None:
    assert read_claim(account, UID).id == ""
    for claim in ("a" * 32, "b" * 32):
        write_claim(account, UID, claim, TOMORROW)
        known_claim = read_claim(account, UID)
        assert (known_claim.id, known_claim.expires) == (claim, pytest.approx(TOMORROW, abs=1))
        assert known_claim.since == pytest.approx(time.time(), abs=60) and account.owner in known_claim.holder
    assert read_claim(account, "job-1-00000001").id == "" and read_claim(account, "job-2-00000002").id == "0" * 32
    (description,) = account.efs.describe_file_systems()["FileSystems"]
    assert tags.is_ours(description)


def test_of_two_computers_that_claim_a_job_at_once_one_is_refused(account: RecordingAccount, file_system: str) -> None:
    account.after["TagResource"] = lambda: write_claim(RecordingAccount(), UID, "b" * 32, TOMORROW)
    with pytest.raises(CloudError, match=f"^{UID}: another computer has adopted this job at the same moment$"):
        write_claim(account, UID, "a" * 32, TOMORROW)
    assert read_claim(account, UID).id == "b" * 32


def test_claim_without_a_stack_is_refused(account: RecordingAccount) -> None:
    assert read_claim(account, UID).id == ""
    with pytest.raises(CloudError, match="no file system"):
        write_claim(account, UID, "a" * 32, TOMORROW)
