"""Keys for ssh: a person's own pair, made once on this computer, and pairs that live for one launch."""

import base64
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from infra.aws.errors import CloudError

KEY_PATH = Path("~/.imgnet/aws/id_ed25519")


def ensure_own_key() -> Path:
    """Return the path of this person's private key; made if it is not there. Raises `CloudError`.

    It is linked whole under its name, so that two who make it at once agree on one.
    """
    path = KEY_PATH.expanduser()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=".key-", dir=path.parent) as folder:
            new = _generate_key(Path(folder))
            try:
                os.link(new, path)
            except FileExistsError:
                return path
            new.with_suffix(".pub").replace(path.with_suffix(".pub"))
    return path


def read_public_key(path: Path) -> str:
    """Return the public half of a private key: "ssh-ed25519 AAAA...". Raises `CloudError`."""
    return " ".join(_run_ssh_keygen("-y", "-P", "", "-f", str(path)).split()[:2])


def generate_key_pair() -> tuple[str, str]:
    """Return a new pair: the private half as OpenSSH text, and "ssh-ed25519 AAAA...". Raises `CloudError`."""
    with tempfile.TemporaryDirectory(prefix="imgnet-key-") as folder:
        path = _generate_key(Path(folder))
        return path.read_text(), read_public_key(path)


def key_pair_name(public_key: str) -> str:
    """Return the name of the EC2 key pair of a public key: each person has one of their own."""
    blob = base64.b64decode(public_key.split()[1])
    return f"imgnet-{hashlib.sha256(blob).hexdigest()[:12]}"


def _generate_key(folder: Path) -> Path:
    path = folder / KEY_PATH.name
    _run_ssh_keygen("-q", "-t", "ed25519", "-N", "", "-C", "imgnet-cluster", "-f", str(path))
    return path


def _run_ssh_keygen(*arguments: str) -> str:
    try:
        ran = subprocess.run(["ssh-keygen", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CloudError(f"ssh-keygen cannot be run ({error.strerror}); install OpenSSH's client") from error
    if ran.returncode:
        raise CloudError(f"{arguments[-1]}: {' '.join(ran.stderr.split()) or 'ssh-keygen failed'}")
    return ran.stdout
