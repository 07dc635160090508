"""Where rented machines find the images of a job, or a command's data: in S3, in the shared folder, in their image."""

from collections.abc import Collection
from pathlib import Path

from cluster.backends.aws.s3_source import machine_role_problems
from cluster.backends.aws.terms.aws_options import AwsOptions
from infra.aws.client import Account
from infra.aws.s3 import S3_SCHEME, find_bucket_region, parse_s3_url
from infra.aws.stack import efs
from infra.aws.stack.resources import StackContext

SHARED_FOLDER = Path("~/.imgnet/shared")
UPLOAD_HINT = (
    "from S3: imgnet-cluster data put FOLDER s3://BUCKET/NAME, then --data s3://BUCKET/NAME (docs/data-sets.md)"
)
COMMAND_HINT = "or let the command fetch its data"


def data_folder(path: Path) -> Path:
    """Return where images are on the machines. A relative path is in the shared file system."""
    return path if path.is_absolute() or path.parts[:1] == ("~",) else SHARED_FOLDER / path


def is_shared(folder: Path) -> bool:
    """Whether a folder is on the stack's file system, which outlives the machines."""
    shared_parts = SHARED_FOLDER.parts[1:]  # the home folder of the machines' user may be written in full
    return any(folder.parts[start : start + len(shared_parts)] == shared_parts for start in range(len(folder.parts)))


def find_images(source: str, hint: str, options: AwsOptions, account: Account | None) -> tuple[list[str], list[str]]:
    """Return lines for the user about the images of a job, and why the job would certainly find none.

    `source` is a folder of the machines or an address, "" for a job that needs no images; `hint` says what to do about
    a folder. New machines have what is in their machine image, and nothing of this computer. Without an account AWS is
    not asked. Raises `ClusterError`.
    """
    if "://" in source or not source:
        return machine_role_problems(source, account) if account and source.startswith(S3_SCHEME) else [], []
    folder = Path(source)
    has_file_system = True
    if account and is_shared(folder):
        accounts = [account.in_region(region) for region in options.regions or (account.region,)]
        has_file_system = any(efs.exists(StackContext(regional)) for regional in accounts)
    if obstacle := find_obstacle(folder, options.ami, has_file_system):
        return [], [f"{obstacle}; {hint}"]
    return [f"{describe_folder(folder, options.ami)}; {hint}"], []


def find_far_region(source: str, account: Account | None, regions: Collection[str]) -> str:
    """Return the region of the bucket with a job's images if machines may be rented in another one, else ""."""
    if not account or not source.startswith(S3_SCHEME):
        return ""
    bucket_region = find_bucket_region(account, parse_s3_url(source)[0])
    return bucket_region if {bucket_region} != {*regions} else ""


def find_obstacle(folder: Path, ami: str | None, has_file_system: bool) -> str:
    """Return why a job certainly finds no data in this folder of its machines, "" when it may find it."""
    if is_shared(folder):
        return "" if has_file_system else f"{folder}: the shared file system does not exist yet, so it is empty"
    is_in_home = folder.parts[:1] == ("~",) or folder.is_relative_to(Path.home())
    if ami or not is_in_home:
        return ""
    return f"{folder}: rented machines have no folder of this computer, and AWS's images have no data"


def describe_folder(folder: Path, ami: str | None) -> str:
    """Return a line for the plan: which folder must have the data, where nothing puts it."""
    if is_shared(folder):
        place = "on the stack's shared file system"
    elif ami:
        place = f"in the machine image {ami}"
    else:
        place = "on each machine, and AWS's machine images have no data"
    return f"{folder} must exist already, {place}"
