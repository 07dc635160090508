"""Keys for ssh: a person's own pair, made once on this computer, and pairs that live for one launch."""

import base64
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from infra.aws.errors import CloudError

KEY = Path("~/.imgnet/aws/id_ed25519")


def own_key() -> Path:
    """Return the path of this person's private key; made if it is not there. Raises `CloudError`.

    It is linked whole under its name, so that two who make it at once agree on one.
    """
    path = KEY.expanduser()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=".key-", dir=path.parent) as folder:
            new = _make(Path(folder))
            try:
                os.link(new, path)
            except FileExistsError:
                return path
            new.with_suffix(".pub").replace(path.with_suffix(".pub"))
    return path


def public(path: Path) -> str:
    """Return the public half of a private key: "ssh-ed25519 AAAA...". Raises `CloudError`."""
    return " ".join(_keygen("-y", "-P", "", "-f", str(path)).split()[:2])


def new_pair() -> tuple[str, str]:
    """Return a new pair: the private half as OpenSSH text, and "ssh-ed25519 AAAA...". Raises `CloudError`."""
    with tempfile.TemporaryDirectory(prefix="imgnet-key-") as folder:
        path = _make(Path(folder))
        return path.read_text(), public(path)


def key_name(public: str) -> str:
    """Return the name of the EC2 key pair of a public key: each person has one of their own."""
    blob = base64.b64decode(public.split()[1])
    return f"imgnet-{hashlib.sha256(blob).hexdigest()[:12]}"


def _make(folder: Path) -> Path:
    path = folder / KEY.name
    _keygen("-q", "-t", "ed25519", "-N", "", "-C", "imgnet-cluster", "-f", str(path))
    return path


def _keygen(*words: str) -> str:
    try:
        ran = subprocess.run(["ssh-keygen", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CloudError(f"ssh-keygen cannot be run ({error.strerror}); install OpenSSH's client") from error
    if ran.returncode:
        raise CloudError(f"{words[-1]}: {' '.join(ran.stderr.split()) or 'ssh-keygen failed'}")
    return ran.stdout
