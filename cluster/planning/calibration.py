"""Measured constants for a forecast: from a finished job, and for another GPU."""

from dataclasses import replace

from cluster.backends import machine_types
from cluster.backends.machine_types import Shipped
from cluster.errors import BadInput
from cluster.state.result import Result
from cluster.state.spec import Spec
from train.forecast import OURS, Constants, measured

CPU = "CPU"  # the card of machines without any


def measured_by(name: str, result: Result | None) -> Constants:
    """Return the constants that a job measured. Raises `BadInput` when there are none."""
    if not result or result.get("state") != "done":
        raise BadInput(f"--from {name}: is not done; it has measured nothing that a forecast could be made from")
    try:
        kept = result.get("constants")
        return Constants.from_json(kept) if kept else measured(result, name)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"--from {name}: its result.json does not say enough ({error})") from error


def card_of(spec: Spec, result: Result, rented: str = "") -> Shipped:
    """Return the kind of machine that a job ran on: the type that was `rented`; of machines that are not, only what the
    job says itself: that it was on CPUs, or on GPUs of no known name, "".
    """
    found = machine_types.shipped(rented) if rented else None
    gpu = CPU if result.get("device") == "cpu" else ""
    return found or Shipped(f"as {spec.name}'s", spec.procs, gpu, 1e9, None, None if spec.cloud else 0.0)


def for_card(constants: Constants, job: Shipped, kind: Shipped) -> tuple[Constants, str]:
    """Return a job's constants as they hold on a kind of machine, and a line where a part of them does not: speeds
    are those of its card, and seconds of the loader those of its processors. `job` is `card_of` it.
    """
    if job == kind:
        return constants, ""
    if job.on_demand == 0:  # a rented machine has to boot, whatever is said of its speed
        constants = replace(constants, boot=OURS.boot, setup=OURS.setup, fetch=OURS.fetch)
    name = constants.source
    if job.gpu == kind.gpu:
        return constants, f"the processors of {name} are taken for those of {kind.name}" if job.gpu == CPU else ""
    if CPU in (job.gpu, kind.gpu):
        what = "processors" if job.gpu == CPU else "GPUs"
        return OURS, f"{name} ran on {what}, which says nothing of {kind.gpu}: all of {kind.name} is presets"
    if not job.gpu:
        return constants, f"{name} ran on a GPU that is not known by name: {kind.gpu} is taken for its like"
    preset = replace(OURS, source=f"{name}, presets for {kind.gpu}", epoch=constants.epoch, switch=constants.switch,
                     start=constants.start, setup=constants.setup)  # fmt: skip
    return preset, f"{name} ran on {job.gpu}: the speed of {kind.gpu} is the preset's"
