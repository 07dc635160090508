"""When a rented job is to stop at its limits, and when its machines are terminated although they do not answer."""

import time
from collections.abc import Callable

from infra.errors import AdoptedElsewhere, CloudError

from .instances import JobInstances

END_SECONDS = 600.0  # from the end of a job, or its last limit, until machines that do not obey are terminated


class EndWatch:
    """Watches the limits and the end of one job, in its supervisor."""

    def __init__(self, provider: JobInstances, get_stop_reason: Callable[[], str]) -> None:
        self.provider = provider
        self.get_stop_reason = get_stop_reason
        # When the job was last not over, or a machine that may still run answered. Monotonic seconds.
        self.last_good_time = time.monotonic()

    def reached_limit(self) -> str:
        """Return which limit the job has just reached; "" if it has reached none, or was asked to stop before.

        Raises `AdoptedElsewhere` when another computer has taken the job over, while this one slept.
        """
        if self.get_stop_reason():
            return ""
        self.last_good_time = time.monotonic()
        reason = ""
        # Traffic beyond what was expected may use up the dollars at once: then the job is overdue too.
        if self.provider.is_price_limit_reached:
            reason = f"the limit of ${self.provider.max_dollars:,.2f} (--max-price-total) was reached"
        elif self.provider.is_overdue:  # a machine hangs so that neither its agent nor its own power-off works
            reason = "its time limit passed, and not all of its machines have ended"
        if reason:
            try:
                self.provider.require_ownership()
            except AdoptedElsewhere:
                raise
            except CloudError:  # asked again in the next round; agents obey the limits by themselves
                return ""
        return reason

    def note_answer(self) -> None:
        """Note that a machine has answered."""
        if self.get_stop_reason() and not self.provider.is_overdue:
            self.last_good_time = time.monotonic()

    @property
    def is_given_up(self) -> bool:
        """Whether the job is over, but no machine has answered for `END_SECONDS`, or all should have been off since."""
        has_waited = time.monotonic() - self.last_good_time > END_SECONDS
        return has_waited and (bool(self.get_stop_reason()) or self.provider.is_overdue)
