"""Where rented machines find the images, or a command's data: what the plan says of it, and what cannot work.

New machines have what is in their machine image, and nothing of this computer. The images come from S3 (`--data
s3://...`), from the stack's shared file system, where they have to be already, or from a machine image of the user.
"""

from pathlib import Path

from cluster.backends.aws.s3_source import machine_role_problems
from cluster.backends.aws.terms.options import AwsOptions
from cluster.state.spec import JobSpec
from infra.aws.client import Account
from infra.aws.s3 import S3_SCHEME
from infra.aws.stack import efs
from infra.aws.stack.resources import StackContext

from .expected_traffic import SHARED_FOLDER

UPLOAD_HINT = (
    "from S3: imgnet-cluster data put FOLDER s3://BUCKET/NAME, and launch with --data s3://BUCKET/NAME "
    "(docs/data-sets.md)"
)
COMMAND_HINT = "or let the command fetch its data"


def is_shared(folder: Path) -> bool:
    """Whether a folder is on the stack's file system, which outlives the machines."""
    shared_parts = SHARED_FOLDER.parts[1:]  # the home folder of the machines' user may be written in full
    return any(folder.parts[start : start + len(shared_parts)] == shared_parts for start in range(len(folder.parts)))


def find_images(spec: JobSpec, options: AwsOptions, account: Account | None) -> tuple[list[str], list[str]]:
    """Return lines for the user about the images of a job, and why the job would certainly find none.

    A command need not have any. Without an account AWS is not asked. Raises `ClusterError`.
    """
    if account and spec.data_source.startswith(S3_SCHEME):
        return machine_role_problems(spec.data_source, account), []
    if spec.generate_data or "://" in spec.data_source or not spec.train.data:
        return [], []
    hint = COMMAND_HINT if spec.own_command else UPLOAD_HINT
    folder = Path(spec.data_source or spec.train.data)
    has_file_system = True
    if account and is_shared(folder):
        accounts = [account.in_region(region) for region in options.regions or (account.region,)]
        has_file_system = any(efs.find_file_system(StackContext(regional)) for regional in accounts)
    if obstacle := find_obstacle(folder, options.ami, has_file_system):
        return [], [f"{obstacle}; {hint}"]
    return [f"{describe(folder, options.ami)}; {hint}"], []


def find_obstacle(folder: Path, ami: str | None, has_file_system: bool) -> str:
    """Return why a job certainly finds no data in this folder of its machines, "" when it may find it."""
    if is_shared(folder):
        return "" if has_file_system else f"{folder}: the shared file system does not exist yet, so it is empty"
    is_in_home = folder.parts[:1] == ("~",) or folder.is_relative_to(Path.home())
    if ami or not is_in_home:
        return ""
    return f"{folder}: rented machines have no folder of this computer, and AWS's machine images have no data"


def describe(folder: Path, ami: str | None) -> str:
    """Return a line for the plan: which folder must have the data, where nothing puts it."""
    if is_shared(folder):
        place = "on the stack's shared file system"
    elif ami:
        place = f"in the machine image {ami}"
    else:
        place = "on each machine, and AWS's machine images have no data"
    return f"{folder} must exist already, {place}"
