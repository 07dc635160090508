"""Write a job's report into its run folder: `python -m cluster.report RUN_FOLDER`.

The supervisor runs this in a process of its own when a job has ended, so that a failing report cannot harm the job.
"""

import os
import sys
from pathlib import Path

from cluster.jobs.job import Job
from cluster.report import REPORT_FILENAME, write_report
from train.tools.errors import one_line_error


def main() -> int:
    """Write the report. Return 0, or 1 with one line on stderr when it could not be written."""
    run_folder = Path(sys.argv[1])
    os.nice(10)  # jobs that still run on this computer come first
    try:
        write_report([Job(run_folder)], run_folder / REPORT_FILENAME)
    except Exception as error:  # the job has ended, and a missing report must not make it fail
        reason = f"{type(error).__name__}: {one_line_error(error)}"
        print(f"{run_folder.name}: no report was written: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
