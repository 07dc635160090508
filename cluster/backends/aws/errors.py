"""What goes wrong at AWS, as an error of ours."""

import contextlib
from collections.abc import Iterator

from cluster.errors import ClusterError, NoAccount
from infra.aws.errors import CloudError, NoCredentials


@contextlib.contextmanager
def lines() -> Iterator[None]:
    """Turn `CloudError`, which is one line already, into `ClusterError`."""
    try:
        yield
    except CloudError as error:
        raise (NoAccount if isinstance(error, NoCredentials) else ClusterError)(str(error)) from error
