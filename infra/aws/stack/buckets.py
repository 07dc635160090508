"""The stack's optional S3 bucket: data below data/, the files of jobs below runs/. Encrypted, private, TLS only.

The bucket is tagged last, so a tagged bucket is complete. A bucket without tags belongs to the stack only if the
stack's journal says that it was about to be created. What a bucket stores is billed whatever else of the stack there
is, so buckets are found by their names and tags, not only by the tag of the file system.
"""

import json
import logging

from infra.aws import prices, tags
from infra.aws.client import call, paginate
from infra.aws.error_codes import DENIED_CODES
from infra.aws.journal_events import StackChange
from infra.errors import CloudError

from . import efs as stack_efs
from . import policies
from .resources import StackContext, require_ours

logger = logging.getLogger(__name__)

NO_TAGS_CODE = "NoSuchTagSet"
CREATE_BUCKET_INTENT = "make bucket"  # the intent that `StackContext.create("bucket", ...)` writes to the journal
# The parts of an upload that was cut off are stored, and billed, and no listing of the bucket shows them.
ABORT_UPLOADS_RULE = {
    "ID": "abort-uploads",
    "Status": "Enabled",
    "Filter": {"Prefix": ""},
    "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
}
DELETE_BATCH_OBJECTS = 1000  # objects that S3 deletes in one call


def ensure(context: StackContext, name: str, file_system: str) -> None:
    """Create the bucket if missing, and name it in a tag of the file system. Raises `CloudError`."""
    s3 = context.account.s3
    region = context.account.region
    if not is_ours(context, name):
        logger.info(f"creating bucket {name}")
        location = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        context.create("bucket", s3.create_bucket, Bucket=name, **location)
        no_public_access = dict.fromkeys(
            ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
        )
        encryption_rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
        bucket_tags = tags.to_aws_tags(context.resource_tags())
        settings = (
            (s3.put_public_access_block, {"PublicAccessBlockConfiguration": no_public_access}),
            (s3.put_bucket_encryption, {"ServerSideEncryptionConfiguration": {"Rules": [encryption_rule]}}),
            (s3.put_bucket_lifecycle_configuration, {"LifecycleConfiguration": {"Rules": [ABORT_UPLOADS_RULE]}}),
            (s3.put_bucket_policy, {"Policy": json.dumps(policies.bucket_policy(name, region))}),
            (s3.put_bucket_tagging, {"Tagging": {"TagSet": bucket_tags}}),  # last: a tagged bucket is complete
        )
        for function, params in settings:
            call(f"bucket {name}", function, Bucket=name, **params)
    name_tag = tags.to_aws_tags({stack_efs.BUCKET_TAG: name})
    tag_resource = context.account.efs.tag_resource
    context.create("bucket tag of the file system", tag_resource, ResourceId=file_system, Tags=name_tag)


def check_name(name: str | None, stack_bucket: str | None) -> None:
    """Raise `CloudError` for a bucket that cannot be the stack's, which has `stack_bucket` or none."""
    if not name or name == stack_bucket:
        return
    if stack_bucket:
        raise CloudError(
            f"--bucket {name}: the stack has the bucket {stack_bucket} already; leave --bucket out, or remove "
            "that one first, with all data: imgnet-cluster down --stack --delete-data"
        )
    if not name.startswith(policies.BUCKET_PREFIX):
        raise CloudError(
            f"--bucket {name}: the policies allow names that begin with {policies.BUCKET_PREFIX} only; "
            f"take --bucket {policies.BUCKET_PREFIX}{name}"
        )


def list_own(context: StackContext, stack_bucket: str | None = None) -> list[str]:
    """Return the stack's buckets in the region: `stack_bucket`, and others that have its tag. Raises `CloudError`."""
    account = context.account
    prefix = policies.BUCKET_PREFIX
    try:
        found = paginate("buckets", account.s3, "list_buckets", "Buckets", Prefix=prefix, BucketRegion=account.region)
    except CloudError as error:
        if error.code not in DENIED_CODES:
            raise
        logger.warning(f"other buckets {prefix}* cannot be looked for, and are billed if there are any: {error}")
        found = []
    names = {bucket["Name"] for bucket in found if _has_our_tag(context, bucket["Name"])}
    return sorted(names | ({stack_bucket} if stack_bucket else set()))


def _has_our_tag(context: StackContext, name: str) -> bool:
    try:
        return tags.is_ours(call(f"bucket {name}", context.account.s3.get_bucket_tagging, Bucket=name))
    except CloudError as error:
        if error.code in (NO_TAGS_CODE, "NoSuchBucket", *DENIED_CODES):
            return False
        raise


def is_ours(context: StackContext, name: str) -> bool:
    """Whether a bucket exists and is complete. Raises `CloudError` when it belongs to another account."""
    try:
        response = call(f"bucket {name}", context.account.s3.get_bucket_tagging, Bucket=name)
    except CloudError as error:
        if error.code == "NoSuchBucket" or (error.code == NO_TAGS_CODE and _was_intended(context, name)):
            return False
        if error.code != NO_TAGS_CODE:
            raise
        response = {}
    require_ours(response, f"bucket {name}", "take another name, or give it this tag with the value imgnet")
    return True


def remove(context: StackContext, name: str, delete_data: bool) -> bool:
    """Delete the bucket with all its data when `delete_data` is set. Return whether it is gone.

    A bucket that is kept is logged. Raises `CloudError`.
    """
    s3 = context.account.s3
    if not is_ours(context, name):
        return True
    objects = paginate(f"bucket {name}", s3, "list_objects_v2", "Contents", Bucket=name)
    if not delete_data:
        size_gb = sum(entry["Size"] for entry in objects) / 1e9
        price = f"{size_gb:.1f} GB, about {size_gb * prices.S3_PER_GB_MONTH:.2f} $ a month"
        logger.info(
            f"bucket {name} stays with its data ({price}); to delete it: imgnet-cluster down --stack --delete-data"
        )
        return False
    for start in range(0, len(objects), DELETE_BATCH_OBJECTS):
        batch = objects[start : start + DELETE_BATCH_OBJECTS]
        keys = [{"Key": entry["Key"]} for entry in batch]
        context.delete(
            f"objects of bucket {name}", s3.delete_objects, Bucket=name, Delete={"Objects": keys, "Quiet": True}
        )
    return context.delete(f"bucket {name}", s3.delete_bucket, Bucket=name)


def untag_file_system(context: StackContext, file_system: str) -> None:
    """Remove the name of a bucket that is gone. Raises `CloudError`."""
    context.delete(
        "bucket tag of the file system",
        context.account.efs.untag_resource,
        ResourceId=file_system,
        TagKeys=[stack_efs.BUCKET_TAG],
    )


def _was_intended(context: StackContext, name: str) -> bool:
    """Whether this computer's journal has the intent to create this bucket."""
    return context.journal is not None and any(
        change.intent == CREATE_BUCKET_INTENT and change.names.get("Bucket") == name
        for change in context.journal.events(StackChange)
    )
