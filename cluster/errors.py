"""Exit codes of the command, and the errors that it prints as one line. The exit codes are listed in README.md."""

from infra.errors import EXIT_ERROR as EXIT_ERROR
from infra.errors import ClusterError as ClusterError

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_JOB_FAILED = 100
EXIT_UNFINISHED = 101
EXIT_NO_SUCH_JOB = 102
EXIT_JOB_STOPPED = 103
EXIT_INTERRUPTED = 130


class BadInput(ClusterError):
    """The user asked for something impossible: a recipe file that does not exist, a number out of range."""

    exit_code = EXIT_USAGE


class SetupFailed(ClusterError):
    """Machines that a job needs cannot be used. The text names them and says why."""


class NoSuchJob(ClusterError):
    """No run folder has the name that was given."""

    exit_code = EXIT_NO_SUCH_JOB
