"""A run of MLflow, through its client."""

import os

from .protocol import PROJECT, TrackedRun, TrackerRequest

RUN_ID_TAG = "imgnet.run_id"
MEASURED_SCALAR = "loss/train"  # is logged at every interval, so its history says how far a run was logged


class TrackerRun(TrackedRun):
    """The run of a job, found by a tag. Its step is the number of images seen, as in TensorBoard.

    MLflow keeps all values of a step, so that steps that are done again after a loss are left out here.
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
        self.last_images = -1
        if found:
            self.run_id = found[0].info.run_id
            history = self.client.get_metric_history(self.run_id, MEASURED_SCALAR)
            self.last_images = max((metric.step for metric in history), default=-1)
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            tags = {RUN_ID_TAG: request.run_id}
            run = self.client.create_run(experiment.experiment_id, tags=tags, run_name=request.run_id)
            self.run_id = run.info.run_id
            for name, value in request.settings.items():
                self.client.log_param(self.run_id, name, value)

    def log(self, images: int, time: float, values: dict[str, float]) -> None:
        """Log scalars at x = `images`."""
        if images <= self.last_images:
            return
        moment = int(1000 * time)
        metrics = [self.make_metric(name, value, moment, images) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def finish(self, is_complete: bool) -> None:
        """End the run; one that is not complete counts as killed until a later attempt goes on with it."""
        self.client.set_terminated(self.run_id, "FINISHED" if is_complete else "KILLED")
