"""Files: names in UTF-8, atomic replacement, exclusive creation, opening, locks, folders in which others write too."""

import contextlib
import errno
import fcntl
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal
from uuid import uuid4

PROJECT_ROOT = Path(__file__).resolve().parents[2]
# The errors of a path at which there is something else than a regular file of a size that can be read.
NO_FILE_ERRORS = (errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EFBIG)
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
LOCK_POLL_SECONDS = 0.02
SHARED_LOCK = 0o666  # permissions of a lock in a folder that a group may share
MAX_FILE_BYTES = 64_000_000  # of a file that is read as a whole
UTF8_VARIABLE = "PYTHONUTF8"  # of Python: 1 for file names and text in UTF-8
FORMER_UTF8_VARIABLE = "IMGNET_FORMER_PYTHONUTF8"  # what it was before `use_utf8_names` has set it
ContentWriter = Callable[[BinaryIO], object]


def use_utf8_names() -> None:
    """Begin this process anew in Python's UTF-8 mode where the locale has another encoding. To be called first.

    The names of class folders, and so the classes of a network, are then the same in every locale. The process keeps
    its id and command line; the processes that it starts inherit the mode.
    """
    former = os.environ.get(UTF8_VARIABLE, "")
    if sys.getfilesystemencoding() != "utf-8" and former != "1":  # with it, Python was told to ignore the variable
        os.environ |= {UTF8_VARIABLE: "1", FORMER_UTF8_VARIABLE: former}
        os.execv(sys.executable, sys.orig_argv)


@contextlib.contextmanager
def _temp_file(path: Path, write_content: ContentWriter, durable: bool = True, mode: int = 0o666) -> Iterator[Path]:
    """Yield a temporary file beside `path`, with what a function writes into it. At the end the file is gone.

    An `OSError` names `path`. With `durable` the file is synced to disk, and at the end its folder.
    """
    temp = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(temp, "wb", opener=partial(os.open, mode=mode)) as file:
            write_content(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield temp
    except OSError as error:
        if error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        with contextlib.suppress(OSError):  # the folder may be missing too
            temp.unlink(missing_ok=True)
    if durable:
        sync(path.parent, os.O_DIRECTORY)


def write_atomic(path: Path, content: bytes, durable: bool = True, mode: int = 0o666) -> None:
    """Write or replace a file so that a reader sees the old content or the new, never a part. Raises `OSError`.

    With `durable` the file survives a power failure. The umask takes permissions from `mode`.
    """
    write_atomic_with(path, lambda file: file.write(content), durable, mode)


def write_atomic_with(path: Path, write_content: ContentWriter, durable: bool = True, mode: int = 0o666) -> None:
    """Write or replace a file like `write_atomic`, with what a function writes into it. Raises `OSError`."""
    with _temp_file(path, write_content, durable, mode) as temp:
        temp.replace(path)


def create_once(path: Path, content: bytes) -> bool:
    """Create a file, durably and as a whole, unless it exists; return whether this call did. Raises `OSError`."""
    try:
        with _temp_file(path, lambda file: file.write(content)) as temp:
            os.link(temp, path)
    except FileExistsError:
        return False
    return True


def sync(path: Path, flags: int = 0) -> None:
    """Sync a file or a folder to disk: a new file name is durable only when its folder is. `flags` are of open(2)."""
    handle = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path, mode: Literal["rb", "ab"] = "rb", permissions: int = 0o666) -> BinaryIO:
    """Open a file. Raises `OSError`, also for a FIFO or a device, whose opening or reading could hang.

    For writing, a symbolic link is refused too, and a new file gets the permissions that the umask leaves.
    """
    return open(path, mode, opener=partial(_open_regular, permissions=permissions))


def _open_regular(path: str, flags: int, permissions: int = 0o666) -> int:
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW  # somebody else may have placed a link in a shared folder
    handle = os.open(path, flags | os.O_NONBLOCK, permissions)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, "is a folder, not a file" if stat.S_ISDIR(mode) else "is not a regular file", path)


@dataclass(frozen=True)
class FileVersion:
    """What changes with a file: a file of the same version has the same content."""

    inode: int
    size: int  # in bytes
    changed_ns: int


def file_version(path: Path) -> FileVersion | None:
    """Return the version of a file, None when there is none. Raises other `OSError`s."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)
    return None


def is_visible(path: Path) -> bool:
    """Whether a path exists; False where its file server fails: `Path.exists` would raise ESTALE and EIO of NFS."""
    return os.path.exists(path)  # noqa: PTH110


def read_file(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file. Raises `OSError`, also when it is not a regular file or has more bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, max_bytes) + 1)  # takes memory for so many bytes, however many there are
        if len(content) > size:  # it has grown meanwhile
            content += file.read(max_bytes + 1 - len(content))
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes / 1e6:.0f} MB", str(path))
    return content


@contextlib.contextmanager
def locked(path: Path, timeout_seconds: float = math.inf, permissions: int = 0o600) -> Iterator[None]:
    """Hold an exclusive lock on a file while the `with` block runs. The kernel releases the lock of a dead process.

    While it is held, the file contains the ID of this process. Waits at most `timeout_seconds` for the present holder,
    then raises `BlockingIOError`. Whoever may read the file can hold its lock; `permissions` say who.
    """
    deadline = time.monotonic() + timeout_seconds
    with open(path, "a", opener=partial(_open_regular, permissions=permissions)) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOCK_POLL_SECONDS)
            except OSError as error:  # such as ENOSYS of Lustre without `-o flock`
                raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(path)) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock file, also one of another computer where the file system shares locks."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# --- below a folder in which other users may write too ----------------------------------------------------------------
# No symbolic link is followed there: one of another user could lead to any file of this process's user, for example to
# a start-up file of the shell.


def make_folder_below(root: Path, path: str) -> None:
    """Create a folder below `root`, with its parents. Raises `OSError`, also when one of them is a symbolic link."""
    with folder_below(root, f"{path}/"):
        pass


@contextlib.contextmanager
def folder_below(root: Path, path: str) -> Iterator[int]:
    """Open the folder of a file below `root` and create it if necessary; yield its descriptor. Raises `OSError`."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in path.split("/")[:-1]:
            inner = _open_or_make_folder(part, folder)
            os.close(folder)
            folder = inner
        yield folder
    except OSError as error:
        if error.errno is None:
            raise
        raise _describe_link(error, root / path) from None
    finally:
        os.close(folder)


def _open_or_make_folder(name: str, parent: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        return os.open(name, flags, dir_fd=parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return os.open(name, flags, dir_fd=parent)


@contextlib.contextmanager
def open_below(root: Path, path: str, flags: int) -> Iterator[BinaryIO]:
    """Open a file below `root` for writing, with the flags of open(2), and create it and its folder if necessary.

    Raises `OSError`, also for anything but a regular file.
    """
    with folder_below(root, path) as folder:
        # With O_NONBLOCK the opening of a FIFO does not wait for its reader.
        flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(path.rpartition("/")[2], flags, 0o644, dir_fd=folder)
        with os.fdopen(handle, "wb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            yield file


def overwrite_below(root: Path, path: str, content: bytes) -> None:
    """Overwrite a small file in place. For files that change each second, and whose readers ignore torn content.

    After a rename, readers on NFS would see the old file for a while, or none (ESTALE). Raises `OSError`.
    """
    with open_below(root, path, os.O_RDWR) as file:
        # First write, then truncate: on a full disk the old content stays.
        os.pwrite(file.fileno(), content, 0)
        os.ftruncate(file.fileno(), len(content))


def _describe_link(error: OSError, path: Path) -> OSError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
        message = "a part of this path is a symbolic link or not a regular file; remove it"
        return OSError(error.errno, message, str(path))
    return OSError(error.errno, error.strerror, str(path))
