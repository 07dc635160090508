"""Keeps ssh to a job's machines open for its supervisor: the rule for its address, and the tag that protects it."""

import contextlib
from collections.abc import Sequence

from cluster.backends.aws.terms.rental_spec import RentalSpec
from infra.aws import tags
from infra.aws.client import Account, get_public_address
from infra.aws.instances import instances
from infra.aws.journal_events import LaunchRequest
from infra.aws.launch_request import Internet
from infra.aws.stack import security_group
from infra.errors import CloudError


class SshAccess:
    """The address from which ssh to a job's machines is open. Their tag names it, so no other computer closes it."""

    def __init__(self, rental_spec: RentalSpec) -> None:
        self.terms = rental_spec
        self.address = rental_spec.ssh_address  # CIDR range that may connect
        self.new_address = ""  # the present address of this computer where it is another one, as last seen

    def resolve_address(self) -> str:
        """Return who may connect: the user's range (--from), else the present address of this computer."""
        self.address = self._present_address() or self.address
        return self.address

    def _present_address(self) -> str:
        """Return the public address of this computer, "" if it is not known or the user has named a range."""
        with contextlib.suppress(CloudError):
            return "" if self.terms.is_address_fixed else get_public_address()
        return ""

    def restore(self, account: Account, request: LaunchRequest | None) -> str:
        """Open ssh to this computer again if it was closed, at the machines of a request.

        Returns a warning if this computer has another address now, else "". Raises `CloudError`.
        """
        present_address = "" if self.terms.internet is Internet.PRIVATE else self._present_address()
        self.new_address = present_address if present_address != self.address else ""
        if self.new_address:
            return (
                f"the address of this computer is now {self.new_address}, but ssh is open to {self.address}; "
                "run: imgnet-cluster up --stack"
            )
        if request:
            owner, port = self.terms.owner, request.ssh_port
            security_group.allow_ssh_from(account, _group(request), self.address, owner, image_port=port)
        return ""

    def follow(self, account: Account, request: LaunchRequest, ids: Sequence[str]) -> None:
        """Tag the machines with the new address, now that they are reached, if the user has opened ssh to it."""
        if security_group.is_open_to(account, _group(request), self.new_address):
            instances.set_tags(account, ids, {tags.SSH_FROM: self.new_address})
            self.address = self.new_address
        self.new_address = ""


def _group(request: LaunchRequest) -> str:
    (group,) = request.parameters["NetworkInterfaces"][0]["Groups"]
    return str(group)
