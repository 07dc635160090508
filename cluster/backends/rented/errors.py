"""Translates errors of a cloud into `ClusterError`."""

import contextlib
from collections.abc import Iterator

from cluster.errors import ClusterError, NoCloudAccess
from infra.errors import CloudError, NoCredentials
from train.tools.records import DamagedRecord


@contextlib.contextmanager
def cloud_errors_as_cluster_errors() -> Iterator[None]:
    """Raise each `CloudError` of the block as `ClusterError`, or `NoCloudAccess` when credentials are missing.

    A damaged journal is a `ClusterError` too. The message stays as it is: it is already one line.
    """
    try:
        yield
    except (CloudError, DamagedRecord) as error:
        error_class = NoCloudAccess if isinstance(error, NoCredentials) else ClusterError
        raise error_class(str(error)) from error
