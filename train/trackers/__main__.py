"""The tracker process: follows a file of metrics and logs its rows, until the trainer has ended.

`python -m train.trackers`, with a `TrackerRequest` as the first line of stdin. The second line, "done" or
"interrupted", ends it when all rows are logged; so does the death of the trainer. Only this process waits for a
tracker. What its library prints goes to a log on the machine, and a line on its first error to the trainer's output.
"""

import contextlib
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from train.metrics.records import EpochRow, StepRow, parse_row, val_scalars
from train.tools import process
from train.tools.files import open_regular
from train.tools.records import decode_json

from .tracker_process import TrackerRequest

POLL_SECONDS = 1.0
RETRY_SECONDS = 30.0  # after an error of the library
LOG_FILE = "tracker.log"
CREDENTIALS = re.compile(r"//[^/@\s]+@")  # in a URL
MAX_ERROR_CHARACTERS = 300
PROJECT = "imgnet-cluster"  # of the runs, unless the user's environment names another
RUN_ID_TAG = "imgnet.run_id"  # of MLflow


class WandbRun:
    """The run of a job in Weights & Biases. Its step is the number of images seen, as in TensorBoard.

    wandb drops values whose step is smaller than the last one, so that steps done again after a loss are logged once.
    """

    def __init__(self, request: TrackerRequest) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=request.run_id,
            name=os.environ.get("WANDB_NAME") or request.run_id,
            config=dict(request.settings),
            dir=os.environ.get("WANDB_DIR") or request.folder,
            resume="allow",
        )

    def log(self, images: int, time: float, values: dict[str, float]) -> None:
        """Log scalars at x = `images`, measured at `time` (seconds since 1970)."""
        self.run.log(values, step=images)

    def finish(self, is_complete: bool) -> None:
        """End the run; one that is not complete is marked as failed until a later attempt goes on with it."""
        self.run.finish(exit_code=0 if is_complete else 1)


class MlflowRun:
    """The run of a job in MLflow, found by a tag. Its step is the number of images seen, as in TensorBoard.

    MLflow keeps all values of a step, so that those that are measured again after a loss are left out here. How far an
    earlier attempt came is looked up for steps and for validations by the first scalar of a row, logged as a whole.
    """

    def __init__(self, request: TrackerRequest) -> None:
        import mlflow
        from mlflow.entities import Metric

        self.make_metric = Metric
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri(f"sqlite:///{request.folder}/mlflow.db")
        self.client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        found = self.client.search_runs([experiment.experiment_id], f"tags.`{RUN_ID_TAG}` = '{request.run_id}'")
        self.is_resumed = bool(found)
        self.last_images: dict[str, int] = {}  # of earlier attempts, by the first scalar of a row
        if found:
            self.run_id = found[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            tags = {RUN_ID_TAG: request.run_id}
            run = self.client.create_run(experiment.experiment_id, tags=tags, run_name=request.run_id)
            self.run_id = run.info.run_id
            for name, value in request.settings.items():
                self.client.log_param(self.run_id, name, value)

    def log(self, images: int, time: float, values: dict[str, float]) -> None:
        """Log scalars at x = `images`, measured at `time` (seconds since 1970)."""
        first = next(iter(values), "")
        if first and first not in self.last_images:
            history = self.client.get_metric_history(self.run_id, first) if self.is_resumed else []
            self.last_images[first] = max((metric.step for metric in history), default=-1)
        if first and images > self.last_images[first]:
            moment = int(1000 * time)
            metrics = [self.make_metric(name, value, moment, images) for name, value in values.items()]
            self.client.log_batch(self.run_id, metrics=metrics)

    def finish(self, is_complete: bool) -> None:
        """End the run; one that is not complete counts as killed until a later attempt goes on with it."""
        self.client.set_terminated(self.run_id, "FINISHED" if is_complete else "KILLED")


# The methods of a run may block, and raise any exception of the tracker's library.
TrackedRun = WandbRun | MlflowRun
RUN_TYPES: dict[str, type[TrackedRun]] = {"wandb": WandbRun, "mlflow": MlflowRun}


class TrackerLoop:
    """Logs the rows of a request's file to its run. Rows that could not be logged are tried again."""

    def __init__(self, request: TrackerRequest, console: TextIO) -> None:
        self.request = request
        self.console = console
        self.run: TrackedRun | None = None
        self.offset = 0  # of the first row that is not logged
        self.has_reported = False
        self.end = ""  # the second line of stdin

    def listen(self) -> None:
        """Wait for the end of the attempt. To be run in a thread."""
        self.end = sys.stdin.readline().strip() or "interrupted"

    def follow(self) -> None:
        """Log rows until all are logged after the end of the attempt."""
        next_try = 0.0
        while True:
            end = self.end  # before the last rows are read
            if end or time.monotonic() >= next_try:
                try:
                    self.log_new_rows()
                    if end and self.run:
                        self.run.finish(end == "done")
                except Exception as error:  # of a library and its network
                    self.report(error)
                    next_try = time.monotonic() + RETRY_SECONDS
            if end:
                return
            time.sleep(POLL_SECONDS)

    def log_new_rows(self) -> None:
        """Log the rows that are new. Opens the run first."""
        if self.run is None:
            self.run = RUN_TYPES[self.request.tracker](self.request)
        with contextlib.suppress(FileNotFoundError), open_regular(Path(self.request.metrics)) as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.log_row(line)
                self.offset += len(line)

    def log_row(self, line: bytes) -> None:
        """Log the scalars of a row, under the names that they have in TensorBoard."""
        assert self.run
        if row := parse_row(line, StepRow):
            values = {name: value for name, value in row.scalars.items() if value is not None}
            self.run.log(row.images, row.time, values)
        elif epoch := parse_row(line, EpochRow):
            self.run.log(epoch.images, epoch.time, val_scalars(epoch))

    def report(self, error: BaseException) -> None:
        """Print the first error, without the credentials that a URL may have."""
        if not self.has_reported:
            self.has_reported = True
            text = CREDENTIALS.sub("//", " ".join(f"{error}".split()))[:MAX_ERROR_CHARACTERS]
            reason = f"{type(error).__name__}: {text}"
            print(f"{self.request.tracker}: {reason}; training goes on", file=self.console, flush=True)


def main() -> None:
    """Send the metrics of one attempt to the tracker. Exit without waiting for the threads of its library."""
    process.die_with_parent()
    with contextlib.suppress(OSError):
        os.nice(10)
    request = decode_json(TrackerRequest, sys.stdin.buffer.readline(), "stdin")
    console = os.fdopen(os.dup(1), "w")
    with open_regular(Path(request.folder) / LOG_FILE, "ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    loop = TrackerLoop(request, console)
    threading.Thread(target=loop.listen, daemon=True).start()
    loop.follow()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
