"""What can go wrong, as one line for a person and an exit code for a script (README, "Exit codes")."""

(
    EXIT_OK,
    EXIT_ERROR,
    EXIT_USAGE,
    EXIT_JOB_FAILED,
    EXIT_UNFINISHED,
    EXIT_NO_SUCH_JOB,
    EXIT_JOB_STOPPED,
    EXIT_INTERRUPTED,
) = 0, 1, 2, 100, 101, 102, 103, 130


class ClusterError(Exception):
    """Something the user can mend; the text says what, where, and what to type next."""

    exit_code = EXIT_ERROR


class BadInput(ClusterError):
    """The command was asked for something that cannot be: a recipe that is not there, a number out of range."""

    exit_code = EXIT_USAGE


class SetupFailed(ClusterError):
    """Machines that a job needs cannot be used; names them and says why."""


class AwsNotConfigured(ClusterError):
    """AWS does not know us: no keys, no region."""


class NoSuchJob(ClusterError):
    """No run folder has this name."""

    exit_code = EXIT_NO_SUCH_JOB
