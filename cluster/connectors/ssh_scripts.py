"""What the machine's sh is told: POSIX sh, the coreutils, GNU find. Words are quoted; paths may begin with ~/.

A command runs once, however often the connection drops. sshd starts it in a session of its own, so it outlives its
connection. It belongs to a folder, commands/<id>, which only the first to come can make; what it says and its code
are files in there. Whoever comes again with the same id waits for these. The folder goes when the caller has it all.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMMAND_KEPT_MINUTES = 24 * 60
HIGHEST_SIGNAL = 31  # a shell says 128 + n for the n-th signal, and so do programs that mean it
EXIT_NO_FOLDER = 71  # the exit code when the machine has no room for the command's folder; sysexits.h: EX_OSERR
EXIT_INPUT_TRUNCATED = 75  # when not all input has come; EX_TEMPFAIL

# $n: bytes of input that come on stdin; $k: "" or "again"; "$@": the command. `b` tells this boot from others, whose
# process numbers mean nothing. The redirections stand at exec: dash forgets those of a subshell before it.
RUN_SCRIPT = r"""
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
SWEEP_SCRIPT = r"""
find "$d" -mindepth 1 -maxdepth 1 -mmin +{minutes} 2>/dev/null | while read -r one; do
  if [ ! -e "$one/code" ] && {{ read -r p q <"$one/pid"; }} 2>/dev/null && kill -0 "$p" 2>/dev/null; then continue; fi
  rm -rf "$one"
done >/dev/null 2>&1 &
"""

# Every process of the command's session, whatever group it is in, then its folder.
KILL_SCRIPT = r"""
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
WRITE_SCRIPT = r"""
[ ! -d "$p" ] || { echo "is a folder" >&2; exit 1; }
mkdir -p "$f" || exit 1
if dd of="$t" bs=1M conv=fsync status=none && [ "$(stat -c %s "$t")" = "$n" ] && mv -f "$t" "$p"; then
  sync "$f"
else
  rm -f "$t"
  exit 1
fi
"""

LIST_FILES_SCRIPT = r"""
cd "$f" 2>/dev/null || exit 0
find . \( -type f -o -type l -xtype f \) ! -name '.*' -print0 | xargs -0r stat -L --printf '%s %n\0' 2>/dev/null
exit 0
"""

# $o: where to begin, from 1 on.
READ_SCRIPT = r"""
[ -e "$p" ] || exit 0
exec 3<"$p" || exit 1
tail -c "+$o" <&3 | head -c "$n"
"""


@dataclass(frozen=True)
class CommandExit:
    """How a command ended: its code, negative for a signal, and the sizes of its two outputs, which follow."""

    code: int
    stdout_bytes: int
    stderr_bytes: int


def quote_path(path: str) -> str:
    """Return a path as a word of sh; ~/ is the machine's home."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (shlex.quote(path[1:]) if path[1:] else "")
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def build_script(body: str, **variables: str) -> bytes:
    """A script with its variables set before it, run in the machine's home."""
    head = " ".join(f"{name}={value}" for name, value in variables.items())
    return os.fsencode(f"cd || cd /\n{head}\n{body}")


def run_script(
    command_id: str,
    folder: str,
    argv: Sequence[str],
    *,
    input_bytes: int = 0,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    is_retry: bool = False,
    sweep: bool = False,
) -> bytes:
    """Return the script that runs a command once by this id, with `size` bytes of input, or picks up what it said."""
    words = list(argv)
    if env:
        words = ["env", *(f"{name}={value}" for name, value in env.items()), *words]
    if timeout is not None:
        words = ["timeout", "-s", "KILL", f"{max(timeout, 0.001):.3f}", *words]
    body = (
        f"{SWEEP_SCRIPT.format(minutes=COMMAND_KEPT_MINUTES) if sweep else ''}set -- {shlex.join(words)}\n{RUN_SCRIPT}"
    )
    return build_script(
        body, d=quote_path(f"{folder}/commands"), i=command_id, n=str(input_bytes), k="again" if is_retry else ""
    )


def kill_script(command_id: str, folder: str) -> bytes:
    """Return the script that kills a command with everything that it started, and forgets it."""
    return build_script(KILL_SCRIPT, d=quote_path(f"{folder}/commands/{command_id}"))


def parse_exit(command_id: str, output: bytearray) -> tuple[CommandExit, int] | None:
    """Return how a command ended and where its output begins; None while its line has not come.

    What a talkative login shell said before is passed over.
    """
    start = output.find(b"\n%s " % command_id.encode())
    stop = output.find(b"\n", start + 1)
    if start < 0 or stop < 0:
        return None
    code, out, err = (int(word) for word in output[start + 1 : stop].split()[1:])
    return CommandExit(128 - code if 128 < code <= 128 + HIGHEST_SIGNAL else code, out, err), stop + 1


def write_script(path: str, content_bytes: int, unique_suffix: str) -> bytes:
    """Return the script that replaces a file by `size` bytes of stdin, whole or not at all."""
    folder, _, name = path.rpartition("/")
    folder = folder or ("/" if path.startswith("/") else ".")
    temp = quote_path(f"{folder}/.{name[:200]}.{unique_suffix}")
    return build_script(WRITE_SCRIPT, p=quote_path(path), f=quote_path(folder), t=temp, n=str(content_bytes))


def read_script(path: str, offset: int, limit: int) -> bytes:
    """Return the script that prints at most `limit` bytes of a file from an offset, nothing when it is not there."""
    return build_script(READ_SCRIPT, p=quote_path(path), o=str(offset + 1), n=str(limit))


def cat_script(path: str) -> bytes:
    """Return the script that prints a file."""
    return build_script('exec cat "$p"', p=quote_path(path))


def list_files_script(folder: str) -> bytes:
    """Return the script that prints size, space, ./path and NUL of each file below a folder, but for hidden ones."""
    return build_script(LIST_FILES_SCRIPT, f=quote_path(folder))


NEW_BYTES_LIMIT = 1 << 24


# One dd for each file that has grown costs less than a Python that starts, up to about 15 of them.
NEW_BYTES_SCRIPT = r"""
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


def new_bytes_script(
    folder: str, subfolders: Sequence[str], known_sizes: Mapping[str, int], delimiter: str, limit_bytes: int
) -> bytes:
    """Return the script that prints mark, path and new bytes of each file that has grown."""
    known = "\n".join(f"    {shlex.quote(path)}) o={size};;" for path, size in known_sizes.items())
    body = NEW_BYTES_SCRIPT.replace("{names}", " ".join(quote_path(one) for one in subfolders)).replace(
        "{known}", known
    )
    return build_script(body, f=quote_path(folder), m=delimiter, r=str(limit_bytes))


def parse_new_bytes(stdout: bytes, delimiter: str) -> dict[str, bytes]:
    """Return the new bytes of each file by its path."""
    found = {}
    for part in stdout.split(f"{delimiter}\n".encode())[1:]:
        path, _, content = part.partition(b"\n")
        found[os.fsdecode(path)] = content
    return found
