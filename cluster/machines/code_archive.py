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

from cluster.connectors.local import PROJECT_ROOT, Connector
from cluster.errors import ClusterError

CODE_PACKAGES = ("cluster", "infra", "recipes", "train")
MAX_CODE_BYTES = 100_000_000  # bytes before compression
UPLOAD_TIMEOUT_SECONDS = 600.0

# Words: the temporary folder, the final one. Whoever is second finds the final one taken, and that is well.
UNPACK_SCRIPT = """
trap 'rm -rf "$1"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$1" && tar -xzf - -C "$1" --no-same-owner || exit 1
find "$1" -type f -exec sync {} + 2>/dev/null
mv -T "$1" "$2" 2>/dev/null || test -d "$2"
"""


def pack_code(root: Path = PROJECT_ROOT) -> tuple[bytes, str]:
    """Return the tree as tar.gz, and its key: 16 hex digits of the SHA-256 of names, kinds, x-bits and contents.

    It holds what git tracks or would track; outside a checkout the four packages and pyproject.toml. Whose files they
    are and when they changed is left out. Raises `ClusterError` when they have more than 100 MB (1e6 bytes), or when
    one cannot be read.
    """
    sizes = _file_sizes(root, _files_known_to_git(root)) or _file_sizes(root, _files_of_packages(root))
    _check_total_size(root, sizes)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(sizes):
            try:
                _add_file(archive, root, name)
            except OSError as error:
                raise ClusterError(
                    f"{root / name}: {error.strerror}, so the code cannot be sent; launch again"
                ) from None
        if "pyproject.toml" not in sizes:
            _add_bytes(archive, tarfile.TarInfo("pyproject.toml"), _pyproject_of_installed())
    plain = packed.getvalue()
    return gzip.compress(plain, compresslevel=6, mtime=0), hashlib.sha256(plain).hexdigest()[:16]


def upload_code(machine: Connector, folder: str, archive_bytes: bytes, code_hash: str) -> tuple[str, bool]:
    """Put packed code on a machine as <folder>/code/<key> and return that path; False when it was there already.

    Whole or not at all, and two at once are safe. Raises `ClusterError` when there is no room, or no right to write.
    """
    target = f"{folder}/code/{code_hash}"
    if machine.run(["test", "-d", target], check=False).code == 0:
        return target, False
    words = ["sh", "-c", UNPACK_SCRIPT, "unpack", f"{folder}/code/.{code_hash}.{uuid4().hex}", target]
    done = machine.run(words, check=False, timeout=UPLOAD_TIMEOUT_SECONDS, input=archive_bytes)
    if done.code:
        said = (done.err.decode(errors="replace").strip() or f"code {done.code}").splitlines()[0]
        raise ClusterError(
            f"{machine.name}: the code cannot be put into {target}: {said}; mend it or name another folder"
        )
    return target, True


def _files_known_to_git(root: Path) -> list[str]:
    """What git tracks or would track; nothing outside a checkout, or where git cannot be asked."""
    if not (root / ".git").exists():
        return []
    words = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(words, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]


def _files_of_packages(root: Path) -> list[str]:
    """What the four packages hold, without what Python has compiled, and pyproject.toml."""
    found = [path.relative_to(root) for name in CODE_PACKAGES for path in (root / name).rglob("*")]
    return [str(path) for path in [*found, Path("pyproject.toml")] if "__pycache__" not in path.parts]


def _file_sizes(root: Path, names: list[str]) -> dict[str, int]:
    """The bytes of those that are files or links; what is deleted, a folder or another repository is left out."""
    sizes = {}
    for name in names:
        with contextlib.suppress(OSError):
            one = (root / name).lstat()
            if stat.S_ISREG(one.st_mode) or stat.S_ISLNK(one.st_mode):
                sizes[name] = one.st_size
    return sizes


def _check_total_size(root: Path, sizes: dict[str, int]) -> None:
    """Raise `ClusterError` when the files are too many bytes to send to every machine."""
    total = sum(sizes.values())
    if total > MAX_CODE_BYTES:
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
        raise ClusterError(
            f"{root}: {total / 1e6:.0f} MB to send as code, the limit is {MAX_CODE_BYTES / 1e6:.0f} MB; put what is no code "
            f"into .gitignore: {', '.join(f'{name} ({sizes[name] / 1e6:.0f} MB)' for name in largest)}"
        )


def _add_file(archive: tarfile.TarFile, root: Path, name: str) -> None:
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


def _pyproject_of_installed() -> bytes:
    """What pip installed has no pyproject.toml beside it: one that says what `cluster.machines.python_env` reads."""
    try:
        needs = importlib.metadata.requires("imgnet-cluster") or []
    except importlib.metadata.PackageNotFoundError:
        needs = []
    lines = [f"    {one!r}," for one in needs if "extra ==" not in one]
    return "\n".join(["[project]", "dependencies = [", *lines, "]", ""]).encode()
