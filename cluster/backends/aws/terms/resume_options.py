"""The options of a resume: the job stays in the region of its checkpoints."""

from dataclasses import replace

from cluster.backends.planner import ResumedRun
from cluster.backends.rented.provider import JOURNAL_FILE
from cluster.errors import BadInput
from infra.aws.journal import Journal

from .options import AwsOptions


def options_of_resume(options: AwsOptions, resumed: ResumedRun | None) -> AwsOptions:
    """Return the options with the region in which the resumed job last had machines: its shared folder is there.

    Raises `BadInput` when the options name other regions only.
    """
    if resumed is None:
        return options
    journal = Journal(resumed.run.folder.path / JOURNAL_FILE)
    regions = [recorded.request.place.region for recorded in journal.launch_requests() if recorded.is_granted]
    if not regions:  # the job never had a machine
        return options
    region = regions[-1]
    if options.regions and region not in options.regions:
        name = resumed.run.spec.name
        raise BadInput(
            f"--region {', '.join(options.regions)}: the checkpoints of {name} are in the shared folder of {region}; "
            "leave --region out"
        )
    return replace(options, regions=(region,))
