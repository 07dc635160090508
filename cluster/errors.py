"""Exit codes of the command, and the errors that it prints as one line. The exit codes are listed in README.md."""

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_JOB_FAILED = 100
EXIT_UNFINISHED = 101
EXIT_NO_SUCH_JOB = 102
EXIT_JOB_STOPPED = 103
EXIT_INTERRUPTED = 130


class ClusterError(Exception):
    """An error that the user can correct. Its text says what is wrong, where, and what to type next."""

    exit_code = EXIT_ERROR


class BadInput(ClusterError):
    """The user asked for something impossible: a recipe file that does not exist, a number out of range."""

    exit_code = EXIT_USAGE


class SetupFailed(ClusterError):
    """Machines that a job needs cannot be used. The text names them and says why."""


class NoCloudAccess(ClusterError):
    """This computer cannot use the cloud: it has no credentials that the cloud accepts, or no region is set."""


class JobAdopted(NoCloudAccess):
    """Another computer supervises the job since `since` (seconds since 1970), and this one must not."""

    def __init__(self, text: str, since: float) -> None:
        super().__init__(text)
        self.since = since


class NoCloudAnswer(ClusterError):
    """The cloud cannot be reached, or does not permit what it was asked."""


class NoSuchJob(ClusterError):
    """No run folder has the name that was given."""

    exit_code = EXIT_NO_SUCH_JOB
