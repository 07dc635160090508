"""Write a job's report into its run folder: `python -m cluster.report RUN`. The supervisor's, at the end of a job."""

import os
import sys
from pathlib import Path

from cluster.jobs.job import Job
from cluster.report import REPORT_FILENAME, write_report
from train.tools.filesystem import one_line_error


def main() -> int:
    """Write it. Returns 1 with one line on stderr when that cannot be done."""
    run = Path(sys.argv[1])
    os.nice(10)  # other jobs come first
    try:
        write_report([Job(run)], run / REPORT_FILENAME)
    except Exception as error:  # the job is over, and does not fail of its report
        print(f"{run.name}: no report was written: {type(error).__name__}: {one_line_error(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
