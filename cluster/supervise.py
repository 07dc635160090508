"""Beside a job: brings its files home and, when it has ended, writes its result. `python -m cluster.supervise RUN`.

It may be killed and started again at any time, and two of them do no harm: every command that looks at the job does the
same step once.
"""

import signal
import sys
import time
from pathlib import Path

from .errors import ClusterError
from .job import Job

BEAT = 1.0


def main() -> int:
    """Follow the run folder's job to its end. Returns 0, or 1 when the folder cannot be written."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the session may end before the result is written
    job = Job(Path(sys.argv[1]))
    while True:
        try:
            job.refresh()
        except ClusterError as error:
            print(f"{job.name}: {error}", file=sys.stderr)
            if not job.alive:
                return 1
        if job.ended:
            return 0
        time.sleep(BEAT)


if __name__ == "__main__":
    sys.exit(main())
