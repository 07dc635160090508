"""What is new in a folder's files on a machine, beyond what one has: a script for its sh, and its answer."""

import os
import shlex
from collections.abc import Mapping, Sequence

from cluster.connectors.ssh_scripts import quoted, script

CHANGES_BYTES = 1 << 24

# One dd for each file that has grown costs less than a Python that starts, up to about 15 of them.
LIST = r"""
cd "$f" 2>/dev/null || exit 0
find {names} -type f ! -name '.*' ! -path '*
*' -printf '%s %p\n' 2>/dev/null | while read -r s p; do
  case $p in
{known}
    *) o=-1;;
  esac
  [ "$s" -gt "$o" ] && [ "$r" -gt 0 ] || continue
  [ "$o" -ge 0 ] || o=0
  c=$((s - o))
  [ "$c" -le "$r" ] || c=$r
  r=$((r - c))
  printf '%s\n%s\n' "$m" "$p"
  [ "$c" = 0 ] || dd if="$p" bs=65536 iflag=skip_bytes,count_bytes skip="$o" count="$c" status=none
done
exit 0
"""


def changes_script(folder: str, names: Sequence[str], have: Mapping[str, int], mark: str, limit: int) -> bytes:
    """Return the script that prints mark, path and new bytes of each file that has grown."""
    known = "\n".join(f"    {shlex.quote(path)}) o={size};;" for path, size in have.items())
    body = LIST.replace("{names}", " ".join(quoted(one) for one in names)).replace("{known}", known)
    return script(body, f=quoted(folder), m=mark, r=str(limit))


def parse_changes(said: bytes, mark: str) -> dict[str, bytes]:
    """Return the new bytes of each file by its path."""
    found = {}
    for part in said.split(f"{mark}\n".encode())[1:]:
        path, _, content = part.partition(b"\n")
        found[os.fsdecode(path)] = content
    return found
