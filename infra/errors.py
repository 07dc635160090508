"""Errors that a person can fix, and those of a cloud that are told apart. Each reads in one line."""

EXIT_ERROR = 1


class ClusterError(Exception):
    """An error that the user can correct. Its text says what is wrong, where, and what to type next."""

    exit_code = EXIT_ERROR


class CloudError(ClusterError):
    """An error of a cloud. `code` is the cloud's error code, "" for none."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class NoCredentials(CloudError):
    """No credentials or no region is set, or the cloud does not accept the credentials."""


class NoAnswer(CloudError):
    """The cloud cannot be reached, or does not permit the call."""


class AdoptedElsewhere(NoCredentials):
    """Another computer supervises the job since `since` (seconds since 1970). This one may end it, and no more."""

    def __init__(self, text: str, since: float) -> None:
        super().__init__(text)
        self.since = since


class Interrupted(CloudError):
    """The job must stop, so waiting for machines was given up."""


class MachinesRefused(CloudError):
    """The cloud did not launch the machines of a request."""


class NoMachines(CloudError):
    """No place has the machines, or none may be rented any more."""


class EndedExternally(NoMachines):
    """The job's machines were terminated by a user or by a limit, so the job stops instead of renting new ones."""
