"""The bucket of a stack, for who wants one: data in data/, what jobs leave in runs/. Encrypted, shut, tagged last.

The tag says that it is whole. A bucket without tags is taken for ours only when our own journal says that we were about
to make it.
"""

from typing import Any

from infra.aws import tags
from infra.aws.client import call, pages
from infra.aws.errors import CloudError

from . import efs as stack_efs
from .resources import Work, not_ours

DOLLARS_GB_MONTH = 0.023  # S3 Standard, us-east-1
UNTAGGED = "NoSuchTagSet"
MAKE = "make bucket"
BATCH = 1000  # objects that S3 deletes in one call


def ensure(work: Work, name: str, file_system: str) -> None:
    """Make the bucket, and let the file system's tag name it. Raises `CloudError`."""
    s3, words = work.account.s3, {"Bucket": name}
    if not ours(work, name):
        work.say(f"making bucket {name}")
        place = {"LocationConstraint": work.account.region}
        more = {} if work.account.region == "us-east-1" else {"CreateBucketConfiguration": place}
        work.make("bucket", s3.create_bucket, **words, **more)
        shut = dict.fromkeys(
            ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
        )
        call(f"bucket {name}", s3.put_public_access_block, **words, PublicAccessBlockConfiguration=shut)
        rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
        call(f"bucket {name}", s3.put_bucket_encryption, **words, ServerSideEncryptionConfiguration={"Rules": [rule]})
        call(f"bucket {name}", s3.put_bucket_tagging, **words, Tagging={"TagSet": tags.pairs(work.tags())})
    mark = tags.pairs({stack_efs.BUCKET: name})
    work.make("name of the bucket", work.account.efs.tag_resource, ResourceId=file_system, Tags=mark)


def ours(work: Work, name: str) -> bool:
    """Whether a bucket is there and whole. Raises `CloudError` when it is somebody else's."""
    try:
        said = call(f"bucket {name}", work.account.s3.get_bucket_tagging, Bucket=name)
    except CloudError as error:
        if error.code == "NoSuchBucket" or (error.code == UNTAGGED and _intended(work, name)):
            return False
        if error.code != UNTAGGED:
            raise
        said = {}
    if not tags.ours(said):
        raise not_ours(f"bucket {name}", "take another name, or give it this tag with the value imgnet")
    return True


def remove(work: Work, name: str, file_system: str, delete_data: bool) -> None:
    """Remove the bucket, when told to with all that is in it; what stays is in `work.left`."""
    s3 = work.account.s3
    if not ours(work, name):
        work.drop(
            "name of the bucket", work.account.efs.untag_resource, ResourceId=file_system, TagKeys=[stack_efs.BUCKET]
        )
        return
    objects = pages(f"bucket {name}", s3, "list_objects_v2", "Contents", Bucket=name)
    if objects and not delete_data:
        size = sum(one["Size"] for one in objects) / 1e9
        price = f"{size:.1f} GB, about {size * DOLLARS_GB_MONTH:.2f} $ a month"
        work.left.append(f"bucket {name} stays with its data ({price}): imgnet-cluster down --stack --delete-data")
        return
    for start in range(0, len(objects), BATCH):
        keys: list[dict[str, Any]] = [{"Key": one["Key"]} for one in objects[start : start + BATCH]]
        work.drop(f"objects of bucket {name}", s3.delete_objects, Bucket=name, Delete={"Objects": keys, "Quiet": True})
    if work.drop(f"bucket {name}", s3.delete_bucket, Bucket=name):
        efs, key = work.account.efs, stack_efs.BUCKET
        work.drop("name of the bucket", efs.untag_resource, ResourceId=file_system, TagKeys=[key])


def _intended(work: Work, name: str) -> bool:
    return work.journal is not None and any(one.get("Bucket") == name for one in work.journal.lines(MAKE))
