"""A run of Weights & Biases, through its library."""

import os

from .protocol import PROJECT, TrackedRun, TrackerRequest


class TrackerRun(TrackedRun):
    """The run of a job. Its step is the number of images seen, as in TensorBoard.

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
        """Log scalars at x = `images`."""
        self.run.log(values, step=images)

    def finish(self, is_complete: bool) -> None:
        """End the run; one that is not complete is marked as failed until a later attempt goes on with it."""
        self.run.finish(exit_code=0 if is_complete else 1)
