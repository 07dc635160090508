"""What the supervisor of a rented job does at the moment, taken from the log and shown by `status`."""

import logging

from cluster.state import supervisor_records
from cluster.state.run_folder import RunFolder


class ActivityHandler(logging.Handler):
    """Shows what clouds and their controller log as the job's current activity. Warnings are no activity."""

    @classmethod
    def install(cls, run_folder: RunFolder) -> None:
        """Show the activity in a run folder, instead of in the one of an earlier controller of this process."""
        handler = cls(run_folder)
        for name in ("infra", "cluster.backends"):
            activity_logger = logging.getLogger(name)
            others = [other for other in activity_logger.handlers if not isinstance(other, cls)]
            activity_logger.handlers[:] = [*others, handler]

    def __init__(self, run_folder: RunFolder) -> None:
        super().__init__()
        self.run_folder = run_folder

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message to the run folder."""
        if record.levelno == logging.INFO:
            supervisor_records.write_activity(self.run_folder.path, record.getMessage())
