"""The bucket of a stack, for who wants one: data in data/, what jobs leave in runs/. Encrypted, shut, tagged last.

The tag says that it is whole. A bucket without tags is taken for ours only when our own journal says that we were about
to make it.
"""

from typing import Any

from infra.aws import tags
from infra.aws.client import call, paginate
from infra.aws.errors import CloudError

from . import efs as stack_efs
from .resources import StackContext, not_ours_error

S3_DOLLARS_PER_GB_MONTH = 0.023  # S3 Standard, us-east-1
NO_TAGS_CODE = "NoSuchTagSet"
CREATE_BUCKET_INTENT = "make bucket"
DELETE_BATCH_OBJECTS = 1000  # objects that S3 deletes in one call


def ensure(context: StackContext, name: str, file_system: str) -> None:
    """Make the bucket, and let the file system's tag name it. Raises `CloudError`."""
    s3, words = context.account.s3, {"Bucket": name}
    if not is_ours(context, name):
        context.log(f"making bucket {name}")
        place = {"LocationConstraint": context.account.region}
        more = {} if context.account.region == "us-east-1" else {"CreateBucketConfiguration": place}
        context.create("bucket", s3.create_bucket, **words, **more)
        shut = dict.fromkeys(
            ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
        )
        call(f"bucket {name}", s3.put_public_access_block, **words, PublicAccessBlockConfiguration=shut)
        rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
        call(f"bucket {name}", s3.put_bucket_encryption, **words, ServerSideEncryptionConfiguration={"Rules": [rule]})
        call(
            f"bucket {name}",
            s3.put_bucket_tagging,
            **words,
            Tagging={"TagSet": tags.to_aws_tags(context.resource_tags())},
        )
    mark = tags.to_aws_tags({stack_efs.BUCKET_TAG: name})
    context.create("name of the bucket", context.account.efs.tag_resource, ResourceId=file_system, Tags=mark)


def is_ours(context: StackContext, name: str) -> bool:
    """Whether a bucket is there and whole. Raises `CloudError` when it is somebody else's."""
    try:
        said = call(f"bucket {name}", context.account.s3.get_bucket_tagging, Bucket=name)
    except CloudError as error:
        if error.code == "NoSuchBucket" or (error.code == NO_TAGS_CODE and _was_intended(context, name)):
            return False
        if error.code != NO_TAGS_CODE:
            raise
        said = {}
    if not tags.is_ours(said):
        raise not_ours_error(f"bucket {name}", "take another name, or give it this tag with the value imgnet")
    return True


def remove(context: StackContext, name: str, file_system: str, delete_data: bool) -> None:
    """Remove the bucket, when told to with all that is in it; what stays is in `work.left`."""
    s3 = context.account.s3
    if not is_ours(context, name):
        context.delete(
            "name of the bucket",
            context.account.efs.untag_resource,
            ResourceId=file_system,
            TagKeys=[stack_efs.BUCKET_TAG],
        )
        return
    objects = paginate(f"bucket {name}", s3, "list_objects_v2", "Contents", Bucket=name)
    if objects and not delete_data:
        size = sum(one["Size"] for one in objects) / 1e9
        price = f"{size:.1f} GB, about {size * S3_DOLLARS_PER_GB_MONTH:.2f} $ a month"
        context.leftovers.append(
            f"bucket {name} stays with its data ({price}): imgnet-cluster down --stack --delete-data"
        )
        return
    for start in range(0, len(objects), DELETE_BATCH_OBJECTS):
        keys: list[dict[str, Any]] = [{"Key": one["Key"]} for one in objects[start : start + DELETE_BATCH_OBJECTS]]
        context.delete(
            f"objects of bucket {name}", s3.delete_objects, Bucket=name, Delete={"Objects": keys, "Quiet": True}
        )
    if context.delete(f"bucket {name}", s3.delete_bucket, Bucket=name):
        efs, key = context.account.efs, stack_efs.BUCKET_TAG
        context.delete("name of the bucket", efs.untag_resource, ResourceId=file_system, TagKeys=[key])


def _was_intended(context: StackContext, name: str) -> bool:
    return context.journal is not None and any(
        one.get("Bucket") == name for one in context.journal.lines(CREATE_BUCKET_INTENT)
    )
