"""Runs of the known trackers, each through its library. Their methods may block, and raise whatever that raises."""

import os

from .tracker_process import TrackerRequest

PROJECT = "imgnet-cluster"  # of the runs, unless the user's environment names another
RUN_ID_TAG = "imgnet.run_id"  # of MLflow


class WandbRun:
    """The run of a job in Weights & Biases. Its step is the number of images seen, as in TensorBoard.

    wandb drops values whose step is smaller than the last one. After a loss, the steps that are done again are
    therefore logged once.
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
    earlier attempt came is looked up for steps and for validations: it may have logged the last step of an epoch and no
    validation. The first scalar tells, because all scalars of a row are logged at once.
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
        """Log scalars at x = `images`."""
        if not values or images <= self.last_images_before(next(iter(values))):
            return
        moment = int(1000 * time)
        metrics = [self.make_metric(name, value, moment, images) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def last_images_before(self, name: str) -> int:
        """Return up to which number of images earlier attempts have logged a scalar, -1 where none has."""
        if name not in self.last_images:
            history = self.client.get_metric_history(self.run_id, name) if self.is_resumed else []
            self.last_images[name] = max((metric.step for metric in history), default=-1)
        return self.last_images[name]

    def finish(self, is_complete: bool) -> None:
        """End the run; one that is not complete counts as killed until a later attempt goes on with it."""
        self.client.set_terminated(self.run_id, "FINISHED" if is_complete else "KILLED")


TrackedRun = WandbRun | MlflowRun
RUN_TYPES: dict[str, type[TrackedRun]] = {"wandb": WandbRun, "mlflow": MlflowRun}
