"""Finds the file system that holds a path, and whether it is a network file system."""

import re
from pathlib import Path
from typing import Any

NETWORK_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "ceph",
    "lustre",
    "glusterfs",
    "beegfs",
    "gpfs",
    "wekafs",
    "afs",
    "9p",
)


def mount_of(path: Path, mountinfo: str = "") -> dict[str, Any]:
    """Return the mount that holds a path, from the text of /proc/self/mountinfo (its format: proc(5)).

    The keys are type, options, source, point (the mount point) and network, which says whether it is a network file
    system.
    """
    mount: dict[str, Any] = {"type": "", "options": "", "network": False, "source": "", "point": ""}
    for line in (mountinfo or Path("/proc/self/mountinfo").read_text()).splitlines():
        left, _, right = line.partition(" - ")
        mount_fields = left.split()
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), mount_fields[4]))
        # Of two mounts at the same point the later one hides the earlier.
        if path.is_relative_to(point) and len(str(point)) >= len(mount["point"]):
            fs_type, source, options = right.split(" ")[:3]
            mount = {
                "type": fs_type,
                "options": f"{mount_fields[5]},{options}",
                "network": fs_type.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS or ":" in source,
                "source": source,
                "point": str(point),
            }
    return mount
