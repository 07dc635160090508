"""Errors of rented jobs, and the translation of a cloud's errors into `ClusterError`."""

import contextlib
from collections.abc import Iterator, Mapping

from cluster.errors import ClusterError, JobAdopted, NoCloudAccess, NoCloudAnswer
from infra.errors import AdoptedElsewhere, CloudError, NoAnswer, NoCredentials, NoMachines
from infra.rented_machine import RentedMachine
from train.tools.records import DamagedRecord


class EndedExternally(NoMachines):
    """The job's machines were terminated by a user or by a limit, so the job stops instead of renting new ones."""


@contextlib.contextmanager
def cloud_errors_as_cluster_errors() -> Iterator[None]:
    """Raise each `CloudError`, and the damage of a journal, as the `ClusterError` that fits. The message stays."""
    try:
        yield
    except AdoptedElsewhere as error:
        raise JobAdopted(str(error), error.since) from error
    except NoCredentials as error:
        raise NoCloudAccess(str(error)) from error
    except NoAnswer as error:
        raise NoCloudAnswer(str(error)) from error
    except (CloudError, DamagedRecord) as error:
        raise ClusterError(str(error)) from error


def describe_error(error: CloudError, machines: Mapping[str, RentedMachine]) -> str:
    """Return the message of a cloud's error. Without credentials, add when the job's machines power themselves off."""
    if not isinstance(error, NoCredentials):
        return str(error)
    expiry_times = [machine.expires for machine in machines.values()]
    limit = f"at {max(expiry_times)}" if expiry_times else "at the limit of --max-hours"
    return f"{error}; the machines power off {limit}"
