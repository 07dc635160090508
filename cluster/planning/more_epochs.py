"""More epochs for a job that is done, or was stopped: a further phase at the end of its schedule."""

from dataclasses import replace

from cluster.errors import BadInput
from cluster.machines.trained_files import newest_local_checkpoint
from cluster.state.run_folder import Run
from cluster.state.spec import JobSpec
from train.recipe.schedule import Schedule, with_more_epochs
from train.recipe.target import Target

from .launch_options import MoreEpochs


def with_added_epochs(run: Run, options: MoreEpochs) -> JobSpec:
    """Return the specification of a job with the epochs that a resume adds; that of the job when it adds none.

    Raises `BadInput` when the job cannot get them.
    """
    spec, epochs, lr = run.spec, options.epochs, options.lr
    if not epochs:
        if lr is not None:
            raise BadInput("--lr is the learning rate of added epochs: give --epochs +N with it")
        return spec
    schedule = spec.schedule
    if schedule is None:
        raise BadInput(f"--epochs: {spec.name} runs a command of your own, whose epochs this program does not know")
    if schedule.max_steps is not None:
        raise BadInput(f"--epochs: {spec.name} has --max-steps, which distributes its steps over all phases")
    rows = run.folder.epochs()
    done, planned = rows[-1].epoch if rows else 0, spec.recipe.epochs
    total = planned * epochs.startswith("+") + int(epochs)
    if total < planned or total <= done:
        raise BadInput(
            f"--epochs {epochs}: {spec.name} has done {done} of {planned} epochs, and its schedule can only become "
            f"longer: give +N, or a total of {max(planned, done + 1)} or more"
        )
    reached = spec.train.target and Target.parse(spec.train.target).first_epoch_reaching(rows)
    if reached:
        raise BadInput(
            f"--epochs {epochs}: {spec.name} has reached its target {spec.train.target} in epoch {reached.epoch}, "
            "where training ends; give a higher one, or none: --target ''"
        )
    # Machines with folders of their own are not asked: there the trainers find it.
    if done and not spec.has_own_folders and newest_local_checkpoint(run.folder.shared) is None:
        raise BadInput(f"--epochs {epochs}: the checkpoints of {spec.name} are gone from {run.folder.shared}")
    extended = replace(spec, forecast=None, train=replace(spec.train, extended_at=done))
    if total == planned:  # it has ended before
        if lr is not None:
            raise BadInput("--lr is the learning rate of added epochs: there are none")
        return extended
    recipe = with_more_epochs(schedule, total - planned, lr)
    if not recipe.phases[-1].lr_endpoints[0]:
        raise BadInput(
            f"--epochs {epochs}: the schedule of {spec.name} ends at a learning rate of 0; give another: --lr LR"
        )
    return replace(extended, workload=recipe)


def note_on_added_epochs(schedule: Schedule, planned: int, options: MoreEpochs) -> str:
    """Return a note for the plan: which epochs follow the `planned` ones, and their learning rate."""
    origin = "that of the last step before; for another one: --lr" if options.lr is None else "by --lr"
    lr, _ = schedule.scheduled_phases[-1].scaled_lr_endpoints
    return (
        f"epochs {planned + 1} to {schedule.recipe.epochs} train as the last phase does, at a constant learning rate "
        f"of {lr:.4g} ({origin})"
    )
