"""What can go wrong, as one line for a person and an exit code for a script (README, "Exit codes")."""

OK, ERROR, USAGE, FAILED, UNFINISHED, NO_JOB, STOPPED, INTERRUPTED = 0, 1, 2, 100, 101, 102, 103, 130


class ClusterError(Exception):
    """Something the user can mend; the text says what, where, and what to type next."""

    code = ERROR


class BadInput(ClusterError):
    """The command was asked for something that cannot be: a recipe that is not there, a number out of range."""

    code = USAGE


class SetupFailed(ClusterError):
    """Machines that a job needs cannot be used; names them and says why."""


class NoAccount(ClusterError):
    """AWS does not know us: no keys, no region."""


class NoSuchJob(ClusterError):
    """No run folder has this name."""

    code = NO_JOB
