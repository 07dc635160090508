"""SSH key pairs: a person's own, generated on this computer and imported into EC2, and the host keys of launches."""

import base64
import hashlib
import logging
import os
import subprocess
import tempfile
from pathlib import Path

from infra.aws import tags
from infra.aws.client import list_tagged
from infra.errors import CloudError

from .resources import StackContext, require_ours

logger = logging.getLogger(__name__)

KEY_PATH = Path("~/.imgnet/aws/id_ed25519")


def ensure_own_key() -> Path:
    """Return the path of this person's private key, generated on first use. Raises `CloudError`.

    The complete key is linked to its name, so that two processes that generate one at the same time agree on one.
    """
    path = KEY_PATH.expanduser()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=".key-", dir=path.parent) as folder:
            new_key = _generate_key(Path(folder))
            try:
                os.link(new_key, path)
            except FileExistsError:
                return path
            new_key.with_suffix(".pub").replace(path.with_suffix(".pub"))
    return path


def read_public_key(path: Path) -> str:
    """Return the public half of a private key file: "ssh-ed25519 AAAA...". Raises `CloudError`."""
    return " ".join(_run_ssh_keygen("-y", "-P", "", "-f", str(path)).split()[:2])


def generate_key_pair() -> tuple[str, str]:
    """Return a new private key as OpenSSH text, and its public half "ssh-ed25519 AAAA...". Raises `CloudError`."""
    with tempfile.TemporaryDirectory(prefix="imgnet-key-") as folder:
        path = _generate_key(Path(folder))
        return path.read_text(), read_public_key(path)


def key_pair_name(public_key: str) -> str:
    """Return the name of the EC2 key pair for a public key. It holds the key's hash, so each person has their own."""
    blob = base64.b64decode(public_key.split()[1])
    return f"imgnet-{hashlib.sha256(blob).hexdigest()[:12]}"


def _generate_key(folder: Path) -> Path:
    path = folder / KEY_PATH.name
    _run_ssh_keygen("-q", "-t", "ed25519", "-N", "", "-C", "imgnet-cluster", "-f", str(path))
    return path


def _run_ssh_keygen(*arguments: str) -> str:
    """Return the stdout of ssh-keygen. Raises `CloudError`. The last argument is the key file, named in errors."""
    try:
        completed = subprocess.run(["ssh-keygen", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CloudError(
            f"ssh-keygen cannot be run ({error.strerror}); install OpenSSH: sudo apt-get install openssh-client"
        ) from error
    if completed.returncode:
        raise CloudError(f"{arguments[-1]}: {' '.join(completed.stderr.split()) or 'ssh-keygen failed'}")
    return completed.stdout


# --- in EC2 ----------------------------------------------------------------------------------------------------------


def has_key_pair(context: StackContext, name: str) -> bool:
    """Whether EC2 has a key pair. Raises `CloudError` when a key pair of this name lacks the stack tag."""
    for key_pair in list_tagged(context.account, "describe_key_pairs", {}, key_name=[name]):
        require_ours(key_pair, f"key pair {name}", f"type: aws ec2 delete-key-pair --key-name {name}")
        return True
    return False


def ensure_key_pair(context: StackContext, name: str, public_key: str) -> None:
    """Import a public key into EC2, unless EC2 has it. Raises `CloudError`."""
    if not has_key_pair(context, name):
        logger.info(f"importing key pair {name}")
        own_tags = context.tag_specifications("key-pair")
        key, import_key = public_key.encode(), context.account.ec2.import_key_pair
        if not context.create("key pair", import_key, TagSpecifications=own_tags, KeyName=name, PublicKeyMaterial=key):
            has_key_pair(context, name)  # another user has just imported one of this name: check its stack tag


def remove_key_pairs(context: StackContext) -> None:
    """Delete all key pairs that have the stack tag."""
    for key_pair in list_tagged(context.account, "describe_key_pairs", {tags.STACK: tags.STACK_VALUE}):
        name = key_pair["KeyName"]
        context.delete(f"key pair {name}", context.account.ec2.delete_key_pair, KeyName=name)
