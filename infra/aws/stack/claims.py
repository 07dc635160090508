"""Claims: which computer supervises an adopted job, that is one that another computer launched.

The claim is a tag of the stack's file system, which outlives the machines: a computer that slept finds it when it
wakes up, and rents nothing. A job without a claim is supervised by the computer that launched it. The last claim
counts, so when two computers adopt a job at the same time, one of them fails. Machines cannot write tags: their role
may only mount the file system.

AWS allows 50 tags for a resource ("Tagging your Amazon EFS resources"), so each claim says when it may be removed.
"""

import re
import socket
import time
from dataclasses import dataclass
from typing import Self

from infra.aws import tags
from infra.aws.client import Account, call
from infra.errors import CloudError
from train.tools.host import unix_time

from . import efs
from .resources import StackContext

CLAIM_PREFIX = "imgnet:home:"  # begins the tag's key; the job's uid follows
MAX_HOLDER_CHARACTERS = 150  # a tag has at most 256
SETTLE_SECONDS = 3.0  # longer than two computers that adopt a job at the same time need to write their claims


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim on a job, which a computer makes by adopting it. Times are in seconds since 1970.

    `expires` is when it may be removed, `since` when it was made, and `holder` who made it, in words.
    """

    id: str = ""
    expires: float = 0.0
    since: float = 0.0
    holder: str = ""

    @classmethod
    def from_tag(cls, text: str) -> Self:
        """Return the claim of a tag; what the tag does not say is left empty."""
        claim_id, expires, since, holder = [*text.split(" ", 3), "", "", ""][:4]
        times = [tags.parse_time(time_text) or 0.0 for time_text in (expires, since)]
        return cls(id=claim_id, expires=times[0], since=times[1], holder=holder)

    def to_tag(self) -> str:
        """Return the claim as the value of a tag."""
        holder = self.holder[:MAX_HOLDER_CHARACTERS]
        return f"{self.id} {tags.format_time(self.expires)} {tags.format_time(self.since)} {holder}"


def read_claim(account: Account, job_uid: str) -> Claim:
    """Return the claim on a job, an empty one when nobody has adopted it. Raises `CloudError`."""
    description = efs.describe_own(StackContext(account)) or {}
    return Claim.from_tag(tags.read_tags(description).get(CLAIM_PREFIX + job_uid, ""))


def write_claim(account: Account, job_uid: str, claim: str, expires: float) -> None:
    """Claim a job, and remove expired claims. Raises `CloudError`, also when another computer has claimed it since.

    `expires` is in seconds since 1970: after that time no computer rents machines for this launch of the job.
    """
    description = efs.describe_own(StackContext(account))
    if not description:
        raise CloudError(f"there is no file system of imgnet-cluster in {account.region}, so no job to be adopted")
    file_system = description["FileSystemId"]
    claims = {key: text for key, text in tags.read_tags(description).items() if key.startswith(CLAIM_PREFIX)}
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())  # in the characters that all services take in tags
    own_claim = Claim(id=claim, expires=expires, since=unix_time(), holder=f"{account.owner} on {host}")
    old_keys = [key for key, text in claims.items() if Claim.from_tag(text).expires < unix_time()]
    if old_keys:
        action = "remove old claims (elasticfilesystem:UntagResource)"
        call(action, account.efs.untag_resource, ResourceId=file_system, TagKeys=old_keys)
    call(
        "claim the job (elasticfilesystem:TagResource)",
        account.efs.tag_resource,
        ResourceId=file_system,
        Tags=tags.to_aws_tags({CLAIM_PREFIX + job_uid: own_claim.to_tag()}),
    )
    time.sleep(SETTLE_SECONDS)
    if read_claim(account, job_uid).id != claim:
        raise CloudError(f"{job_uid}: another computer has adopted this job at the same moment")
