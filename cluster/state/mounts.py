"""Which file system holds a path, and whether it is a network file system."""

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
    """Return file system type, options, source and mount point of a path, from /proc/self/mountinfo (proc(5))."""
    best: dict[str, Any] = {"type": "", "options": "", "network": False, "source": "", "point": ""}
    for line in (mountinfo or Path("/proc/self/mountinfo").read_text()).splitlines():
        left, _, right = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4]))
        if path.is_relative_to(point) and len(str(point)) >= len(best["point"]):  # a later mount hides an earlier one
            kind, source, options = right.split(" ")[:3]
            network = kind.removeprefix("fuse.") in NETWORK_FILE_SYSTEMS or ":" in source
            best = {"type": kind, "options": f"{left.split()[5]},{options}", "network": network}
            best |= {"source": source, "point": str(point)}
    return best
