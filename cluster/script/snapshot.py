"""Versions of a script's checkpoint folder: copied whole, published by a rename, restored on every machine.

    <shared>/checkpoints/000007/save-00000003/      version 3 of what attempt 7 has saved: plain files
    <shared>/checkpoints/000007/resume-00000002-1a2b3c4d/   what attempt 7 began with, linked by its proposer
    <shared>/checkpoints/000007/.new-1a2b3c4d/      a copy that is not complete, and is never read

A version is never changed, so a file that did not change since the version before is a hard link to it. The script's
own folder shares no file with a version: a script may write into its files in place. Files keep their modification
time; a file of equal path, size and time is taken for the same. Folders, regular files and symbolic links that stay
inside the folder are copied. Sockets, devices and other links are left out.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from uuid import uuid4

from train.tools.agent_protocol import checkpoint_files, checkpoint_folder, checkpoint_folders, checkpoint_step
from train.tools.files import make_folder_below, sync

VERSION_PATTERN = "save-*"
RESUMED_PATTERN = "resume-*"
UNFINISHED_PREFIX = ".new-"
# As a machine lists the file of a version, relative to the folder of all versions.
VERSION_PATH = re.compile(
    r"(?P<version>(?P<attempt>[0-9]{6})/(?P<kind>save|resume)-(?P<number>[0-9]{1,12})[A-Za-z0-9_-]{0,100})/(?P<path>.+)",
    re.DOTALL,
)
RESTLESS_TRIES = 5  # to copy a file that changes meanwhile
COPY_BYTES = 1 << 24  # that are copied at a time
# copy_file_range(2) cannot copy between these files; an ordinary copy can.
NO_RANGE_COPY_ERRORS = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


class FolderChanged(Exception):
    """The folder was changed while it was copied."""


@dataclass(frozen=True)
class Entry:
    """A file, folder or link as a scan finds it. `target` is that of a link, else ""."""

    kind: int  # of stat(2): S_IFREG, S_IFDIR or S_IFLNK
    size: int = 0  # in bytes, of a file
    changed_ns: int = 0  # of a file or folder
    inode: int = 0  # of a file
    permissions: int = 0o644
    target: str = ""

    def is_same_file(self, other: "Entry | None") -> bool:
        """Whether two regular files have the same size and time of modification, and so the same content."""
        return (
            other is not None
            and self.kind == other.kind == stat.S_IFREG
            and (self.size, self.changed_ns) == (other.size, other.changed_ns)
        )


Tree = dict[str, Entry]  # by path relative to the folder; a folder comes before what is in it


def scan(folder: Path) -> Tree:
    """Return what a folder has and can be copied; nothing if missing. Raises `OSError`, also for a link to a folder."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "the script has put a link in its place, which is not followed", str(folder))
    entries: dict[str, Entry] = {}
    pending = [""]
    while pending:
        parent = pending.pop()
        try:
            names = sorted(child.name for child in (folder / parent).iterdir())
        except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile
            continue
        for name in names:
            path = f"{parent}/{name}" if parent else name
            with contextlib.suppress(FileNotFoundError):
                if entry := _describe(folder, path):
                    entries[path] = entry
                    pending += [path] if entry.kind == stat.S_IFDIR else []
    return entries


def _describe(folder: Path, path: str) -> Entry | None:
    """Return the entry of a path below a folder, None for what is not copied."""
    status = (folder / path).lstat()
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG:
        return Entry(kind, status.st_size, status.st_mtime_ns, status.st_ino, stat.S_IMODE(status.st_mode))
    if kind == stat.S_IFLNK:
        target = str((folder / path).readlink())
        return Entry(kind, target=target) if _stays_inside(path, target) else None
    return Entry(kind, changed_ns=status.st_mtime_ns) if kind == stat.S_IFDIR else None


def _stays_inside(path: str, target: str) -> bool:
    """Whether a link at a relative path leads to a place in the same folder, by its text alone.

    A ".." behind a name is refused: the name may be a link, so that the text does not tell where ".." leads.
    """
    names = list(dropwhile(lambda part: part == "..", Path(target).parts))
    place = os.path.normpath(Path(path).parent / target)
    return ".." not in names and not Path(target).is_absolute() and place != ".." and not place.startswith("../")


def has_files(tree: Tree) -> bool:
    """Whether a scan has found anything but folders: an empty folder is no version."""
    return any(entry.kind != stat.S_IFDIR for entry in tree.values())


# --- versions -----------------------------------------------------------------------------------------------------


def versions(shared: Path, attempt: int, with_resumed: bool = True) -> list[Path]:
    """Return the complete versions of an attempt, the newest first: what it saved, then what it resumed from."""
    folder = checkpoint_folder(shared, attempt)
    patterns = (VERSION_PATTERN, RESUMED_PATTERN) if with_resumed else (VERSION_PATTERN,)
    found = [path for pattern in patterns for path in reversed(checkpoint_files(folder, pattern))]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def publish(source: Path, shared: Path, attempt: int, tree: Tree, is_restless: bool = False) -> Path:
    """Copy a folder, as the scan `tree` found it, to a new version of an attempt, and remove the older ones it saved.

    The new version is complete on disk before it has its name. Raises `FolderChanged` when the folder has changed
    since the scan, and `OSError`, for example when the disk is full; nothing of the copy stays then. Of a folder that
    `is_restless`, only each file for itself must not change while it is copied.
    """
    existing = versions(shared, attempt)
    number = max((checkpoint_step(path) for path in existing), default=0) + 1
    target = checkpoint_folder(shared, attempt) / VERSION_PATTERN.replace("*", f"{number:08d}")
    with _new_version(shared, target) as unfinished:
        copy_tree(source, unfinished, tree, existing[0] if existing else None, is_restless)
        if not is_restless and scan(source) != tree:
            raise FolderChanged
    for old in versions(shared, attempt, with_resumed=False)[1:]:
        remove_version(old)
    return target


def link_newest(shared: Path, attempt: int) -> Path | None:
    """Give the newest version of the attempt before a name in the folder of an attempt that is to resume from it.

    Returns the link, None when nothing was saved. Raises `FileNotFoundError` when the version was replaced: call again.
    """
    existing = versions(shared, attempt - 1)
    if not existing:
        return None
    newest = existing[0]
    name = RESUMED_PATTERN.replace("*", f"{checkpoint_step(newest):08d}-{uuid4().hex[:8]}")
    target = checkpoint_folder(shared, attempt) / name
    tree = scan(newest)
    with _new_version(shared, target) as unfinished:
        try:
            copy_tree(newest, unfinished, tree, links_from=newest)
        except FolderChanged:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(newest)) from None
        if not newest.is_dir() or scan(newest).keys() != tree.keys():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(newest))
    return target


def newest_version(shared: Path) -> Path | None:
    """Return the newest version in a shared folder, from the last attempt that has one; None when there is none."""
    numbers = [int(path.name) for path in reversed(checkpoint_folders(shared))]
    return next((version for number in numbers for version in versions(shared, number)), None)


def group_by_version(sizes: Mapping[str, int]) -> list[tuple[str, dict[str, int]]]:
    """Return the complete versions among the files of a checkpoint folder, the oldest first.

    `sizes` are in bytes, by paths such as 000007/save-00000003/epoch_2/model.pt. Each version has its name, such as
    000007/save-00000003, and the sizes of its files by their path in it.
    """
    found: dict[tuple[int, bool, int, str], dict[str, int]] = {}
    for path, size in sizes.items():
        if match := VERSION_PATH.fullmatch(path):
            name = path[: match.end("version")]
            age = (int(match["attempt"]), match["kind"] == "save", int(match["number"]), name)
            found.setdefault(age, {})[match["path"]] = size
    return [(age[-1], found[age]) for age in sorted(found)]


def remove_other_versions(shared: Path, kept: Path) -> None:
    """Remove all versions in a shared folder but one, and unfinished copies; for downloads, which nobody resumes."""
    for folder in checkpoint_folders(shared):
        for other in folder.iterdir():
            if other != kept:
                remove_version(other)


def remove_version(version: Path) -> None:
    """Remove a version, which first loses its name: a reader sees all of it or nothing that it would take."""
    hidden = version.with_name(f"{UNFINISHED_PREFIX}{uuid4().hex}")
    with contextlib.suppress(OSError):
        version.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def restore(version: Path | None, folder: Path) -> int:
    """Make a folder equal to a version (None: empty); equal files stay. Returns the copied bytes. Raises `OSError`."""
    if folder.is_symlink() or not folder.is_dir():  # never remove files where a link of the script leads to
        folder.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = scan(version) if version else {}
    present_paths = [Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)]
    for child in sorted(present_paths, reverse=True):  # what is in a folder comes before the folder
        path = child.relative_to(folder).as_posix()
        status = child.lstat()
        expected = wanted.get(path)
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder and expected and expected.kind == stat.S_IFDIR:
            continue
        present = None if is_folder else _describe(folder, path)
        if expected and present and expected.is_same_file(present) and status.st_nlink == 1:
            continue
        child.rmdir() if is_folder else child.unlink()
    missing = {path: entry for path, entry in wanted.items() if not os.path.lexists(folder / path)}
    copied_bytes = copy_tree(version, folder, missing) if version else 0
    _set_folder_times(folder, wanted)
    return copied_bytes


# --- copies -------------------------------------------------------------------------------------------------------


def copy_tree(source: Path, target: Path, tree: Tree, links_from: Path | None = None, is_restless: bool = False) -> int:
    """Copy the entries of a scan into an existing folder. Returns the number of bytes that were copied.

    Files that `links_from`, a version on the same file system as the target, has too become links to its files.
    Raises `OSError`, and `FolderChanged` when a file is another one than the scan found. With `is_restless` files that
    were replaced meanwhile are copied as they are now, and those that are gone are left out.
    """
    known = scan(links_from) if links_from else {}
    copied_bytes = 0
    for path, entry in tree.items():
        if entry.kind == stat.S_IFDIR:
            (target / path).mkdir()
        elif entry.kind == stat.S_IFLNK:
            (target / path).symlink_to(entry.target)
        elif not (links_from and entry.is_same_file(known.get(path)) and _link(links_from / path, target / path)):
            if is_restless:
                _copy_present_file(source, target, path)
            else:
                _copy_file(source / path, target / path, entry)
            copied_bytes += entry.size
    _set_folder_times(target, tree)
    return copied_bytes


def _set_folder_times(target: Path, tree: Tree) -> None:
    """Give the folders of a copy their times: scripts look for the newest of several."""
    for path, entry in reversed(tree.items()):
        if entry.kind == stat.S_IFDIR:
            os.utime(target / path, ns=(entry.changed_ns, entry.changed_ns))


def _link(source: Path, target: Path) -> bool:
    """Make a hard link. Returns False on a file system without them, and when a file has too many."""
    try:
        os.link(source, target, follow_symlinks=False)
        return True
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP):
            return False
        raise


def _copy_present_file(source: Path, target: Path, path: str) -> None:
    """Copy a file as it is now, unless it is gone. Raises `FolderChanged` when it changes in each of some tries."""
    for _ in range(RESTLESS_TRIES):
        try:
            entry = _describe(source, path)
        except FileNotFoundError:
            return
        if entry is None or entry.kind != stat.S_IFREG:
            return
        try:
            return _copy_file(source / path, target / path, entry)
        except FolderChanged:
            (target / path).unlink(missing_ok=True)
    raise FolderChanged


def _copy_file(source: Path, target: Path, entry: Entry) -> None:
    """Copy a regular file with its time and permissions. Where the file system can, both share their blocks."""
    try:
        source_handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            raise FolderChanged from None
        raise
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, source_handle)
        status = os.fstat(source_handle)
        if (stat.S_IFMT(status.st_mode), status.st_ino) != (entry.kind, entry.inode):
            raise FolderChanged
        mode = entry.permissions & 0o777 | 0o600
        target_handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        stack.callback(os.close, target_handle)
        _copy_bytes(source_handle, target_handle, str(target))
        status = os.fstat(source_handle)
        if (status.st_size, status.st_mtime_ns) != (entry.size, entry.changed_ns):
            raise FolderChanged
        os.utime(target_handle, ns=(entry.changed_ns, entry.changed_ns))


def _copy_bytes(source: int, target: int, target_name: str) -> None:
    """Copy all bytes of an open file. An error has the name of the target."""
    try:
        while os.copy_file_range(source, target, COPY_BYTES):
            pass
    except OSError as error:
        if error.errno not in NO_RANGE_COPY_ERRORS:
            raise OSError(error.errno, error.strerror, target_name) from error
    try:  # the rest, or all on a file system without copy_file_range
        os.lseek(source, os.lseek(target, 0, os.SEEK_CUR), os.SEEK_SET)
        while data := os.read(source, COPY_BYTES):
            while data:
                data = data[os.write(target, data) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, target_name) from error


@contextlib.contextmanager
def _new_version(shared: Path, target: Path) -> Iterator[Path]:
    """Yield a new folder. At the end it is on disk, and gets the name `target`; after an error it is removed."""
    make_folder_below(shared, target.parent.relative_to(shared).as_posix())
    folder = target.with_name(f"{UNFINISHED_PREFIX}{uuid4().hex}")
    folder.mkdir()
    try:
        yield folder
        _sync_tree(folder, scan(folder))
        folder.rename(target)
        sync(target.parent, os.O_NOFOLLOW)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync_tree(folder: Path, tree: Tree) -> None:
    """Sync the folders and new files of a copy to disk. Links to files of an earlier version are on the disk already.

    So the agents, who link a version for the next attempt between two heartbeats, sync no file.
    """
    for path, entry in tree.items():
        is_new_file = entry.kind == stat.S_IFREG and (folder / path).lstat().st_nlink == 1
        if is_new_file or entry.kind == stat.S_IFDIR:
            sync(folder / path, os.O_NOFOLLOW)
    sync(folder, os.O_NOFOLLOW)
