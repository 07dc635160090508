"""Packs the project's working tree into one archive and places it on a machine, as <folder>/code/<hash>.

Equal trees give equal archives, so a machine receives each state of the code once.
"""

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
MAX_CODE_BYTES = 100_000_000  # before compression
UPLOAD_TIMEOUT_SECONDS = 600.0

PackedCode = tuple[bytes, str]  # the archive and its hash
# $1: temporary folder; $2: final folder. If another job placed the same code meanwhile, the final folder exists, and
# that is success too.
UNPACK_SCRIPT = """
trap 'rm -rf "$1"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$1" && tar -xzf - -C "$1" --no-same-owner || exit 1
find "$1" -type f -exec sync {} + 2>/dev/null
mv -T "$1" "$2" 2>/dev/null || test -d "$2"
"""


def pack_code(root: Path = PROJECT_ROOT) -> PackedCode:
    """Return the tree as tar.gz bytes, and its hash: 16 hex digits of SHA-256 over names, kinds, x-bits and contents.

    In a git checkout the archive has every file that git tracks or would track; elsewhere the four packages and
    pyproject.toml. Owners and times are left out. Raises `ClusterError` when the files have more than
    `MAX_CODE_BYTES`, or when one cannot be read.
    """
    sizes = _file_sizes(root, _files_known_to_git(root)) or _file_sizes(root, _files_of_packages(root))
    _check_total_size(root, sizes)
    tar_file = io.BytesIO()
    with tarfile.open(fileobj=tar_file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(sizes):
            try:
                _add_file(archive, root, name)
            except OSError as error:
                raise ClusterError(
                    f"{root / name}: {error.strerror}, so the code cannot be sent to the machines; "
                    "correct that and launch again"
                ) from None
        if "pyproject.toml" not in sizes:
            _add_bytes(archive, tarfile.TarInfo("pyproject.toml"), _pyproject_of_installed())
    tar_bytes = tar_file.getvalue()
    return gzip.compress(tar_bytes, compresslevel=6, mtime=0), hashlib.sha256(tar_bytes).hexdigest()[:16]


def code_folder(folder: str, code_hash: str) -> str:
    """Return where code with this hash is, or will be, on a machine with this folder."""
    return f"{folder}/code/{code_hash}"


def upload_code(machine: Connector, folder: str, archive_bytes: bytes, code_hash: str) -> str:
    """Place packed code on a machine that lacks it. Returns its `code_folder`.

    The folder appears atomically, also if several jobs place it at once. Raises `ClusterError` when the disk is full
    or the folder cannot be written.
    """
    target = code_folder(folder, code_hash)
    temp_folder = f"{folder}/code/.{code_hash}.{uuid4().hex}"
    argv = ["sh", "-c", UNPACK_SCRIPT, "unpack", temp_folder, target]
    result = machine.run(argv, check=False, timeout=UPLOAD_TIMEOUT_SECONDS, input=archive_bytes)
    if result.code:
        reason = (result.err.decode(errors="replace").strip() or f"code {result.code}").splitlines()[0]
        raise ClusterError(
            f"{machine.name}: the code cannot be unpacked into {target}: {reason}; "
            "free space there or chown it to the user who logs in, or set another `folder` in hosts.toml"
        )
    return target


def _files_known_to_git(root: Path) -> list[str]:
    """Return the files that git tracks or would track; none outside a checkout, or when git fails."""
    if not (root / ".git").exists():
        return []
    argv = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        completed = subprocess.run(argv, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [os.fsdecode(name) for name in completed.stdout.split(b"\0") if name]


def _files_of_packages(root: Path) -> list[str]:
    """Return pyproject.toml and the files of the four packages, without compiled Python files."""
    paths = [path.relative_to(root) for name in CODE_PACKAGES for path in (root / name).rglob("*")]
    return [str(path) for path in [*paths, Path("pyproject.toml")] if "__pycache__" not in path.parts]


def _file_sizes(root: Path, names: list[str]) -> dict[str, int]:
    """Return the sizes in bytes of those names that are files or links.

    git also lists deleted files, and other repositories as folders: they are left out.
    """
    sizes = {}
    for name in names:
        with contextlib.suppress(OSError):
            status = (root / name).lstat()
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                sizes[name] = status.st_size
    return sizes


def _check_total_size(root: Path, sizes: dict[str, int]) -> None:
    """Raise `ClusterError`, naming the three largest files, when there are too many bytes to send to every machine."""
    total = sum(sizes.values())
    if total > MAX_CODE_BYTES:
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
        largest_text = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
        raise ClusterError(
            f"{root}: {total / 1e6:.0f} MB to send as code, the limit is {MAX_CODE_BYTES / 1e6:.0f} MB; "
            f"put files that are not code into .gitignore: {largest_text}"
        )


def _add_file(archive: tarfile.TarFile, root: Path, name: str) -> None:
    """Add a file or a link with its name, x-bit and content, and no other metadata."""
    info = tarfile.TarInfo(name)
    path = root / name
    if path.is_symlink():
        info.type = tarfile.SYMTYPE
        info.linkname = str(path.readlink())
        archive.addfile(info)
        return
    info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
    _add_bytes(archive, info, path.read_bytes())


def _add_bytes(archive: tarfile.TarFile, info: tarfile.TarInfo, content: bytes) -> None:
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _pyproject_of_installed() -> bytes:
    """Return a pyproject.toml with the installed package's dependencies, for `cluster.machines.python_env`.

    A package that pip has installed has no pyproject.toml beside it.
    """
    try:
        requirements = importlib.metadata.requires("imgnet-cluster") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    lines = [f"    {requirement!r}," for requirement in requirements if "extra ==" not in requirement]
    return "\n".join(["[project]", "dependencies = [", *lines, "]", ""]).encode()
