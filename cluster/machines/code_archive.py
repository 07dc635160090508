"""The working tree as one archive, equal for equal trees, and its place on a machine: <folder>/code/<key>."""

import contextlib
import gzip
import hashlib
import importlib.metadata
import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path
from uuid import uuid4

from cluster.connectors.local import ROOT, Machine
from cluster.errors import ClusterError

PACKAGES = ("cluster", "infra", "recipes", "train")
LIMIT = 100_000_000  # bytes before compression
SEND_SECONDS = 600.0

# Words: the temporary folder, the final one. Whoever is second finds the final one taken, and that is well.
UNPACK = """
trap 'rm -rf "$1"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$1" && tar -xzf - -C "$1" --no-same-owner || exit 1
find "$1" -type f -exec sync {} + 2>/dev/null
mv -T "$1" "$2" 2>/dev/null || test -d "$2"
"""


def pack(root: Path = ROOT) -> tuple[bytes, str]:
    """Return the tree as tar.gz, and its key: 16 hex digits of the SHA-256 of names, kinds, x-bits and contents.

    It holds what git tracks or would track; outside a checkout the four packages and pyproject.toml. Whose files they
    are and when they changed is left out. Raises `ClusterError` when they have more than 100 MB (1e6 bytes), or when
    one cannot be read.
    """
    sizes = _sizes(root, _tracked(root)) or _sizes(root, _walked(root))
    _check(root, sizes)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(sizes):
            try:
                _add(archive, root, name)
            except OSError as error:
                raise ClusterError(
                    f"{root / name}: {error.strerror}, so the code cannot be sent; launch again"
                ) from None
        if "pyproject.toml" not in sizes:
            _add_bytes(archive, tarfile.TarInfo("pyproject.toml"), _requirements_of_installed())
    plain = packed.getvalue()
    return gzip.compress(plain, compresslevel=6, mtime=0), hashlib.sha256(plain).hexdigest()[:16]


def place(machine: Machine, folder: str, packed: bytes, key: str) -> tuple[str, bool]:
    """Put packed code on a machine as <folder>/code/<key> and return that path; False when it was there already.

    Whole or not at all, and two at once are safe. Raises `ClusterError` when there is no room, or no right to write.
    """
    target = f"{folder}/code/{key}"
    if machine.run(["test", "-d", target], check=False).code == 0:
        return target, False
    words = ["sh", "-c", UNPACK, "unpack", f"{folder}/code/.{key}.{uuid4().hex}", target]
    done = machine.run(words, check=False, timeout=SEND_SECONDS, input=packed)
    if done.code:
        said = (done.err.decode(errors="replace").strip() or f"code {done.code}").splitlines()[0]
        raise ClusterError(
            f"{machine.name}: the code cannot be put into {target}: {said}; mend it or name another folder"
        )
    return target, True


def _tracked(root: Path) -> list[str]:
    """What git tracks or would track; nothing outside a checkout, or where git cannot be asked."""
    if not (root / ".git").exists():
        return []
    words = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(words, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]


def _walked(root: Path) -> list[str]:
    """What the four packages hold, without what Python has compiled, and pyproject.toml."""
    found = [path.relative_to(root) for name in PACKAGES for path in (root / name).rglob("*")]
    return [str(path) for path in [*found, Path("pyproject.toml")] if "__pycache__" not in path.parts]


def _sizes(root: Path, names: list[str]) -> dict[str, int]:
    """The bytes of those that are files or links; what is deleted, a folder or another repository is left out."""
    sizes = {}
    for name in names:
        with contextlib.suppress(OSError):
            one = (root / name).lstat()
            if stat.S_ISREG(one.st_mode) or stat.S_ISLNK(one.st_mode):
                sizes[name] = one.st_size
    return sizes


def _check(root: Path, sizes: dict[str, int]) -> None:
    """Raise `ClusterError` when the files are too many bytes to send to every machine."""
    total = sum(sizes.values())
    if total > LIMIT:
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
        raise ClusterError(
            f"{root}: {total / 1e6:.0f} MB to send as code, the limit is {LIMIT / 1e6:.0f} MB; put what is no code "
            f"into .gitignore: {', '.join(f'{name} ({sizes[name] / 1e6:.0f} MB)' for name in largest)}"
        )


def _add(archive: tarfile.TarFile, root: Path, name: str) -> None:
    """Add a file or a link, with nothing of it but name, x-bit and content."""
    info, path = tarfile.TarInfo(name), root / name
    if path.is_symlink():
        info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
        archive.addfile(info)
        return
    info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
    _add_bytes(archive, info, path.read_bytes())


def _add_bytes(archive: tarfile.TarFile, info: tarfile.TarInfo, content: bytes) -> None:
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _requirements_of_installed() -> bytes:
    """What pip installed has no pyproject.toml beside it: one that says what `cluster.machines.python_env` reads."""
    try:
        needs = importlib.metadata.requires("imgnet-cluster") or []
    except importlib.metadata.PackageNotFoundError:
        needs = []
    lines = [f"    {one!r}," for one in needs if "extra ==" not in one]
    return "\n".join(["[project]", "dependencies = [", *lines, "]", ""]).encode()
