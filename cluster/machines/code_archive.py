"""Packs this project's packages and the user's project into one archive, and unpacks it on a machine.

The unpacked code is in <folder>/code/<hash>. Equal files give equal archives: a machine gets each state of them once.
"""

import hashlib
import importlib.metadata
import io
import tarfile
import zlib
from pathlib import Path
from typing import IO, cast
from uuid import uuid4

from cluster.connectors.ssh import SSHConnector
from cluster.errors import ClusterError
from train.tools.files import PROJECT_ROOT

CODE_PACKAGES = ("cluster", "infra", "recipes", "train")
USER_PROJECT_FOLDER = "user_project"  # in the archive
UPLOAD_TIMEOUT_SECONDS = 600.0

PackedCode = tuple[bytes, str]  # the archive and its hash
# $1: temporary folder; $2: final folder. If another job placed the same code meanwhile, the final folder exists, and
# that is success too. The files get the time of their arrival (-m): a scratch disk is cleaned of old ones.
UNPACK_SCRIPT = """
trap 'rm -rf "$1"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$1" && tar -xzmf - -C "$1" --no-same-owner || exit 1
find "$1" -type f -exec sync {} + 2>/dev/null
mv -T "$1" "$2" 2>/dev/null || test -d "$2"
"""


def pack_code(root: Path = PROJECT_ROOT, project: Path | None = None) -> PackedCode:
    """Return the code as tar.gz bytes, and its hash: 16 hex digits of SHA-256 over names, kinds, x-bits and contents.

    The archive has this project's four packages and pyproject.toml and, below `USER_PROJECT_FOLDER`, a job's copy of
    the user's project. Owners and times are left out. Raises `ClusterError` when a file cannot be read.
    """
    paths = {name: root / name for package in CODE_PACKAGES for name in _file_names(root, package)}
    if (root / "pyproject.toml").is_file():
        paths["pyproject.toml"] = root / "pyproject.toml"
    if project:
        paths |= {f"{USER_PROJECT_FOLDER}/{name}": project / name for name in _file_names(project)}
    packer = _Packer()
    with tarfile.open(fileobj=cast(IO[bytes], packer), mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(paths):
            try:
                _add_file(archive, paths[name], name)
            except OSError as error:
                raise ClusterError(
                    f"{paths[name]}: {error.strerror}, so the code cannot be sent to the machines; "
                    "correct that and launch again"
                ) from None
        if "pyproject.toml" not in paths:
            _add_bytes(archive, tarfile.TarInfo("pyproject.toml"), _pyproject_of_installed())
    return packer.finish()


class _Packer:
    """A file that hashes and compresses what is written to it: the archive itself is never in memory as a whole."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._compressor = zlib.compressobj(level=6, wbits=zlib.MAX_WBITS + 16)  # as gzip does, without a time
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._parts.append(self._compressor.compress(data))
        return len(data)

    def finish(self) -> PackedCode:
        """Return what was written, compressed, and its hash."""
        return b"".join([*self._parts, self._compressor.flush()]), self._hash.hexdigest()[:16]


def code_folder(folder: str, code_hash: str) -> str:
    """Return where code with this hash is, or will be, on a machine with this folder."""
    return f"{folder}/code/{code_hash}"


def upload_code(machine: SSHConnector, folder: str, archive_bytes: bytes, code_hash: str) -> str:
    """Place packed code atomically on a machine that lacks it. Returns its `code_folder`. Raises `ClusterError`."""
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


def _file_names(root: Path, folder: str = ".") -> list[str]:
    """Return the files and links of a folder below `root`, relative to `root`, without compiled Python files."""
    paths = [path for path in (root / folder).rglob("*") if path.is_symlink() or path.is_file()]
    names = [path.relative_to(root) for path in paths]
    return [str(name) for name in names if "__pycache__" not in name.parts]


def _add_file(archive: tarfile.TarFile, path: Path, name: str) -> None:
    info = tarfile.TarInfo(name)
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
    """Return a pyproject.toml for `python_env`: a package that pip has installed has none beside it."""
    try:
        requirements = importlib.metadata.requires("imgnet-cluster") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    lines = [f"    {requirement!r}," for requirement in requirements if "extra ==" not in requirement]
    return "\n".join(["[project]", "dependencies = [", *lines, "]", ""]).encode()
