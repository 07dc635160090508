"""What the machine's sh is told: POSIX sh, the coreutils, GNU find. Words are quoted; paths may begin with ~/.

A command runs once, however often the connection drops. sshd starts it in a session of its own, so it outlives its
connection. It belongs to a folder, commands/<id>, which only the first to come can make; what it says and its code
are files in there. Whoever comes again with the same id waits for these. The folder goes when the caller has it all.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KEPT_MINUTES = 24 * 60
SIGNALS = 31  # a shell says 128 + n for the n-th signal, and so do programs that mean it
NO_FOLDER = 71  # the exit code when the machine has no room for the command's folder; sysexits.h: EX_OSERR
CUT = 75  # when not all input has come; EX_TEMPFAIL

# $n: bytes of input that come on stdin; $k: "" or "again"; "$@": the command. `b` tells this boot from others, whose
# process numbers mean nothing. The redirections stand at exec: dash forgets those of a subshell before it.
RUN = r"""
read -r b </proc/sys/kernel/random/boot_id
[ -d "$d" ] || mkdir -p "$d" || exit 71
t=$d/.$i.$$
d=$d/$i
in=/dev/null
if [ "$n" -gt 0 ]; then
  head -c "$n" >"$t"
  [ "$(stat -c %s "$t")" = "$n" ] || { rm -f "$t"; exit 75; }
fi
if mkdir "$d" 2>/dev/null; then
  echo "$$ $b" >"$d/pid" || exit 71
  if [ "$n" -gt 0 ]; then mv "$t" "$d/in"; in=$d/in; fi
  (exec "$@" <"$in" >"$d/out" 2>"$d/err")
  c=$?
  echo "$c" >"$d/code"
else
  rm -f "$t"
  [ -d "$d" ] || { mkdir "$d"; exit 71; }
  w=0
  until { read -r c <"$d/code"; } 2>/dev/null; do
    if { read -r p q <"$d/pid"; } 2>/dev/null; then
      [ "$q" = "$b" ] && kill -0 "$p" 2>/dev/null || { sleep 0.1; read -r c <"$d/code" || c=137; break; }
    else
      [ "$w" -lt 50 ] || { c=137; break; }
    fi
    w=$((w + 1))
    sleep 0.1
  done
  [ -e "$d/out" ] && [ -e "$d/err" ] || >>"$d/out" >>"$d/err"
fi
o=$(stat -c %s "$d/out" "$d/err")
set -- $o
printf '\n%s %s %s %s\n' "$i" "$c" "$1" "$2"
[ "$1" = 0 ] || head -c "$1" "$d/out"
[ "$2" = 0 ] || head -c "$2" "$d/err"
read -r got || exit 0
if [ -n "$k" ]; then rm -f "$d/in" "$d/out" "$d/err" "$d/pid"; else rm -rf "$d"; fi
"""

# What nobody fetched, and the folders that keep a command from running again when its first call comes late.
SWEEP = r"""
find "$d" -mindepth 1 -maxdepth 1 -mmin +{minutes} 2>/dev/null | while read -r one; do
  if [ ! -e "$one/code" ] && {{ read -r p q <"$one/pid"; }} 2>/dev/null && kill -0 "$p" 2>/dev/null; then continue; fi
  rm -rf "$one"
done >/dev/null 2>&1 &
"""

# Every process of the command's session, whatever group it is in, then its folder.
KILL = r"""
read -r p q <"$d/pid" || exit 0
again=1
while [ -n "$again" ]; do
  again=
  for one in /proc/[0-9]*/stat; do
    { read -r line <"$one"; } 2>/dev/null || continue
    pid=${line%% *}
    set -- ${line##*) }
    [ "$4" = "$p" ] && [ "$1" != Z ] && kill -9 "$pid" 2>/dev/null && again=1
  done
done
rm -rf "$d"
"""

# $n bytes of stdin become the file, when all of them have come.
WRITE = r"""
[ ! -d "$p" ] || { echo "is a folder" >&2; exit 1; }
mkdir -p "$f" || exit 1
if dd of="$t" bs=1M conv=fsync status=none && [ "$(stat -c %s "$t")" = "$n" ] && mv -f "$t" "$p"; then
  sync "$f"
else
  rm -f "$t"
  exit 1
fi
"""

FILES = r"""
cd "$f" 2>/dev/null || exit 0
find . \( -type f -o -type l -xtype f \) ! -name '.*' -print0 | xargs -0r stat -L --printf '%s %n\0' 2>/dev/null
exit 0
"""

# $o: where to begin, from 1 on.
READ = r"""
[ -e "$p" ] || exit 0
exec 3<"$p" || exit 1
tail -c "+$o" <&3 | head -c "$n"
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its code, negative for a signal, and the sizes of its two outputs, which follow."""

    code: int
    out: int
    err: int


def quoted(path: str) -> str:
    """Return a path as a word of sh; ~/ is the machine's home."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (shlex.quote(path[1:]) if path[1:] else "")
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def script(body: str, **values: str) -> bytes:
    """A script with its variables set before it, run in the machine's home."""
    head = " ".join(f"{name}={value}" for name, value in values.items())
    return os.fsencode(f"cd || cd /\n{head}\n{body}")


def run(
    task: str,
    folder: str,
    argv: Sequence[str],
    *,
    size: int = 0,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    again: bool = False,
    sweep: bool = False,
) -> bytes:
    """Return the script that runs a command once by this id, with `size` bytes of input, or picks up what it said."""
    words = list(argv)
    if env:
        words = ["env", *(f"{name}={value}" for name, value in env.items()), *words]
    if timeout is not None:
        words = ["timeout", "-s", "KILL", f"{max(timeout, 0.001):.3f}", *words]
    body = f"{SWEEP.format(minutes=KEPT_MINUTES) if sweep else ''}set -- {shlex.join(words)}\n{RUN}"
    return script(body, d=quoted(f"{folder}/commands"), i=task, n=str(size), k="again" if again else "")


def kill(task: str, folder: str) -> bytes:
    """Return the script that kills a command with everything that it started, and forgets it."""
    return script(KILL, d=quoted(f"{folder}/commands/{task}"))


def ended(task: str, said: bytearray) -> tuple[Ended, int] | None:
    """Return how a command ended and where its output begins; None while its line has not come.

    What a talkative login shell said before is passed over.
    """
    start = said.find(b"\n%s " % task.encode())
    stop = said.find(b"\n", start + 1)
    if start < 0 or stop < 0:
        return None
    code, out, err = (int(word) for word in said[start + 1 : stop].split()[1:])
    return Ended(128 - code if 128 < code <= 128 + SIGNALS else code, out, err), stop + 1


def write(path: str, size: int, mark: str) -> bytes:
    """Return the script that replaces a file by `size` bytes of stdin, whole or not at all."""
    folder, _, name = path.rpartition("/")
    folder = folder or ("/" if path.startswith("/") else ".")
    temp = quoted(f"{folder}/.{name[:200]}.{mark}")
    return script(WRITE, p=quoted(path), f=quoted(folder), t=temp, n=str(size))


def read(path: str, offset: int, limit: int) -> bytes:
    """Return the script that prints at most `limit` bytes of a file from an offset, nothing when it is not there."""
    return script(READ, p=quoted(path), o=str(offset + 1), n=str(limit))


def whole(path: str) -> bytes:
    """Return the script that prints a file."""
    return script('exec cat "$p"', p=quoted(path))


def files(folder: str) -> bytes:
    """Return the script that prints size, space, ./path and NUL of each file below a folder, but for hidden ones."""
    return script(FILES, f=quoted(folder))


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
