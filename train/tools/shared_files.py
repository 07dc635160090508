"""Writes files below a folder in which other users may write too, and follows no symbolic link there.

A link of another user could lead to any file of this process's user, for example to a start-up file of the shell.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


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
