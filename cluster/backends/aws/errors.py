"""What goes wrong at AWS, as an error of ours."""

import contextlib
from collections.abc import Iterator

from cluster.errors import AwsNotConfigured, ClusterError
from infra.aws.errors import CloudError, NoCredentials


@contextlib.contextmanager
def aws_errors_as_cluster_errors() -> Iterator[None]:
    """Turn `CloudError`, which is one line already, into `ClusterError`."""
    try:
        yield
    except CloudError as error:
        raise (AwsNotConfigured if isinstance(error, NoCredentials) else ClusterError)(str(error)) from error
