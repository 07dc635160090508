"""Errors of rented jobs, and what is added to those of a cloud."""

import contextlib
from collections.abc import Iterator, Mapping

from cluster.errors import ClusterError
from infra.errors import CloudError, NoCredentials, NoMachines
from infra.rented_machine import RentedMachine
from train.tools.records import DamagedRecord


class EndedExternally(NoMachines):
    """The job's machines were terminated by a user or by a limit, so the job stops instead of renting new ones."""


@contextlib.contextmanager
def report_damaged_journal() -> Iterator[None]:
    """Raise the damage of a journal as a `ClusterError`."""
    try:
        yield
    except DamagedRecord as error:
        raise ClusterError(str(error)) from error


def describe_error(error: CloudError, machines: Mapping[str, RentedMachine]) -> str:
    """Return the message of a cloud's error. Without credentials, add when the job's machines power themselves off."""
    if not isinstance(error, NoCredentials):
        return str(error)
    expiry_times = [machine.expires for machine in machines.values()]
    limit = f"at {max(expiry_times)}" if expiry_times else "at the limit of --max-hours"
    return f"{error}; the machines power off {limit}"
