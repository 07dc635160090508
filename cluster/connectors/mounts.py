"""Finds the file system that holds a path, and whether it is a network file system."""

import re
from dataclasses import dataclass
from pathlib import Path

NETWORK_FILE_SYSTEMS = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "wekafs", "afs", "9p"]
)


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system: its type, options, source and mount point. `network`: it is on another machine."""

    type: str = ""
    options: str = ""
    network: bool = False
    source: str = ""
    point: str = ""


def mount_of(path: Path, mountinfo: str = "") -> Mount:
    """Return the mount that holds a path, from the text of /proc/self/mountinfo (its format: proc(5))."""
    mount = Mount()
    for line in (mountinfo or Path("/proc/self/mountinfo").read_text()).splitlines():
        left, _, right = line.partition(" - ")
        mount_fields = left.split()
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount_fields[4]))
        # Of two mounts at the same point the later one hides the earlier.
        if path.is_relative_to(point) and len(str(point)) >= len(mount.point):
            fs_type, source, options = right.split(" ")[:3]
            mount = Mount(
                type=fs_type,
                options=f"{mount_fields[5]},{options}",
                network=fs_type.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS or ":" in source,
                source=source,
                point=str(point),
            )
    return mount
