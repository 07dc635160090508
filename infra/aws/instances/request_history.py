"""The launch requests of a job, with their outcomes and machines, as its journal records them. Only reads."""

from dataclasses import dataclass

from infra.aws.journal import Journal
from infra.aws.journal_events import InstanceEnded, LaunchRequest, RequestGranted, RequestRefused


@dataclass(frozen=True)
class RecordedRequest:
    """A launch request in the journal, and its outcome; None while that is unknown."""

    request: LaunchRequest
    outcome: RequestGranted | RequestRefused | None = None

    @property
    def is_granted(self) -> bool:
        """Whether EC2 launched all machines of the request."""
        return isinstance(self.outcome, RequestGranted)

    @property
    def is_refused(self) -> bool:
        """Whether the request has no machines and was given up."""
        return isinstance(self.outcome, RequestRefused)

    @property
    def ids(self) -> list[str]:
        """The IDs of the machines that EC2 launched for the request."""
        return [machine.id for machine in self.outcome.machines] if self.outcome else []


class RequestHistory:
    """The launch requests in the journal of one job, in all regions."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def requests(self) -> list[RecordedRequest]:
        """Return all launch requests in order."""
        requests: dict[int, RecordedRequest] = {}
        for event in self.journal.events(LaunchRequest, RequestGranted, RequestRefused):
            if isinstance(event, LaunchRequest):
                requests[event.number] = RecordedRequest(event)
            elif isinstance(event, RequestGranted | RequestRefused) and event.number in requests:
                requests[event.number] = RecordedRequest(requests[event.number].request, event)
        return list(requests.values())

    @property
    def granted_ids(self) -> list[str]:
        """The IDs of all machines that were ever granted."""
        return [instance_id for recorded in self.requests() if recorded.is_granted for instance_id in recorded.ids]

    @property
    def ended_ids(self) -> set[str]:
        """The IDs of machines whose end is recorded."""
        return {event.id for event in self.journal.events(InstanceEnded)}

    @property
    def alive_ids(self) -> list[str]:
        """The IDs of granted machines whose end is not recorded."""
        ended_ids = self.ended_ids
        return [instance_id for instance_id in self.granted_ids if instance_id not in ended_ids]
