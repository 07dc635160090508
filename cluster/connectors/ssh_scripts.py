"""Shell scripts that run on a machine over ssh. They need POSIX sh, coreutils and GNU find. Paths may start with ~/.

A command runs once, however often the connection drops. sshd starts the script in a session of its own, so it outlives
its connection. The script makes a folder commands/<id>. Only the first call with an id succeeds in making it and runs
the command, whose outputs and exit code become files in the folder. A later call with the same id waits for these
files. The folder is removed when the caller has received everything.

The commands of a job have its name before their id, so that all of them can be ended, whoever started them. What ends
them leaves a mark first, and a command begins only without a mark: none can slip through.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from train.tools.agent_protocol import LOG_FOLDERS

from . import untrusted

COMMAND_KEPT_MINUTES = 24 * 60
END_GRACE_SECONDS = 3.0  # for a command to tidy up when it is ended
# Exit codes of RUN_SCRIPT itself, from sysexits.h.
EXIT_NO_FOLDER = 71  # the command's folder or input cannot be written, for example on a full disk; EX_OSERR
EXIT_ENDED = 69  # the commands of this launch were ended; EX_UNAVAILABLE
EXIT_INPUT_TRUNCATED = 75  # not all of the input arrived; EX_TEMPFAIL

# $n: bytes of input on stdin; $k: "" or "again" for a retry; $g: "" or what precedes the id in the folder's name; $e:
# "" or the name of the mark; "$@": the command. $b is the ID of the machine's current boot: a process ID written during
# an earlier boot means nothing. A retry keeps the folder with the exit code, because the first call may still arrive
# later and must not run the command again. The redirections are at exec because dash drops those of a subshell before
# it.
RUN_SCRIPT = r"""
read -r b </proc/sys/kernel/random/boot_id
[ -d "$d" ] || mkdir -p "$d" || exit 71
t=$d/.$i.$$
e=${e:+$d/$e}
d=$d/$g$i
in=/dev/null
if [ "$n" -gt 0 ]; then
  head -c "$n" >"$t" || { rm -f "$t"; exit 71; }
  [ "$(stat -c %s "$t")" = "$n" ] || { rm -f "$t"; exit 75; }
fi
if mkdir "$d" 2>/dev/null; then
  echo "$$ $b" >"$d/pid" || exit 71
  [ -z "$e" ] || [ ! -e "$e" ] || { rm -rf "$d" "$t"; exit 69; }
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

# Removes outputs that were never fetched, and folders that were kept after a retry, unless their command still runs.
SWEEP_SCRIPT = r"""
find "$d" -mindepth 1 -maxdepth 1 -mmin +{minutes} 2>/dev/null | while read -r old; do
  if [ ! -e "$old/code" ] && {{ read -r p q <"$old/pid"; }} 2>/dev/null && kill -0 "$p" 2>/dev/null; then continue; fi
  rm -rf "$old"
done >/dev/null 2>&1 &
"""

# Ends the commands whose folders begin with $g, and lets no more begin under the mark $e. What they started gets
# SIGTERM and, $grace tenths of a second later, SIGKILL. The scripts that wait for the commands, the leaders of the
# sessions, stay to report how they ended. One whose process ID has become that of another program is left alone.
END_SCRIPT = r"""
read -r b </proc/sys/kernel/random/boot_id
{ mkdir -p "$d" && : >"$d/$e"; } 2>/dev/null
sessions=
for f in "$d/$g"*/; do
  f=${f%/}
  [ ! -e "$f/code" ] && { read -r p q <"$f/pid"; } 2>/dev/null && [ "$q" = "$b" ] || continue
  [ ! -e "/proc/$p" ] || grep -qs 'head -c' "/proc/$p/cmdline" || continue
  sessions="$sessions $p "
done
send_signal() {
  n=0
  for f in /proc/[0-9]*/stat; do
    { read -r line <"$f"; } 2>/dev/null || continue
    pid=${line%% *}
    set -- "$1" ${line##*) }
    case $sessions in *" $5 "*) ;; *) continue;; esac
    [ "$2" = Z ] || [ "$5" = "$pid" ] || { kill "-$1" "$pid" 2>/dev/null && n=$((n + 1)); }
  done
}
send_signal TERM
w=0
while [ "$n" -gt 0 ] && [ "$w" -lt "$grace" ]; do
  w=$((w + 1))
  sleep 0.1
  send_signal 0
done
while [ "$n" -gt 0 ] && [ "$w" -lt $((grace + 40)) ]; do
  w=$((w + 1))
  send_signal KILL
  sleep 0.05
done
"""

# Replaces the file $p of the folder $f by $n bytes of stdin, if all of them arrive in the temporary file $t.
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

# Prints size, space, ./path and NUL for each file below the folder $f.
LIST_FILES_SCRIPT = r"""
cd "$f" 2>/dev/null || exit 0
find . \( -type f -o -type l -xtype f \) -print0 | xargs -0r stat -L --printf '%s %n\0' 2>/dev/null
exit 0
"""

# Prints at most $n bytes of the file $p from byte $o on, counted from 1; nothing if it does not exist.
READ_SCRIPT = r"""
[ -e "$p" ] || exit 0
exec 3<"$p" || exit 1
tail -c "+$o" <&3 | head -c "$n"
"""


def quote_path(path: str) -> str:
    """Return a path quoted for sh; ~/ becomes the home folder on the machine."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (shlex.quote(path[1:]) if path[1:] else "")
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def build_script(body: str, **variables: str) -> bytes:
    """Return a script that sets variables (quoted already) and runs in the home folder on the machine."""
    assignments = " ".join(f"{name}={value}" for name, value in variables.items())
    return os.fsencode(f"cd || cd /\n{assignments}\n{body}")


def run_script(
    command_id: str,
    folder: str,
    argv: Sequence[str],
    *,
    input_bytes: int = 0,
    timeout: float | None = None,
    is_retry: bool = False,
    sweep: bool = False,
    owner: str = "",
    launch: str = "",
) -> bytes:
    """Return the script that runs a command once under this ID, or fetches its outcome if it was started before.

    `input_bytes` is the length of the input that follows the script on stdin. `timeout` is in seconds; the machine
    itself kills the command then. `is_retry` says that the command may have been started by an earlier call. `sweep`
    removes leftovers of a day ago. `end_commands_script` ends the command by its job `owner` and `launch`.
    """
    limit_argv = [] if timeout is None else ["timeout", "-s", "KILL", f"{max(timeout, 0.001):.3f}"]
    sweep_script = SWEEP_SCRIPT.format(minutes=COMMAND_KEPT_MINUTES) if sweep else ""
    return build_script(
        f"{sweep_script}set -- {shlex.join([*limit_argv, *argv])}\n{RUN_SCRIPT}",
        d=quote_path(f"{folder}/commands"),
        i=command_id,
        n=str(input_bytes),
        k="again" if is_retry else "",
        g=shlex.quote(f"{owner}." if owner else ""),
        e=shlex.quote(_end_mark(owner, launch) if owner else ""),
    )


def end_commands_script(folder: str, owner: str, launch: str) -> str:
    """Return a body that ends a job's commands, without `owner` all, and lets no more of this launch begin."""
    variables = {
        "d": quote_path(f"{folder}/commands"),
        "g": shlex.quote(f"{owner}." if owner else ""),
        "e": shlex.quote(_end_mark(owner, launch)),
        "grace": f"{10 * END_GRACE_SECONDS:.0f}",
    }
    return " ".join(f"{name}={value}" for name, value in variables.items()) + END_SCRIPT


def _end_mark(owner: str, launch: str) -> str:
    """Return the name of the file that says that the commands of a launch were ended. `SWEEP_SCRIPT` removes it."""
    return f"ended-{owner}-{launch}"


# --- new bytes of growing files -----------------------------------------------------------------------------------

# One dd per grown file costs less than starting a Python, up to about 15 files. $m: delimiter; $r: bytes that may still
# be printed; $k: files that may still be added; $s: size of the file; $o: its known size, -1 for a new file; $c: bytes
# to print. What `cluster.connectors.untrusted` would not accept is left out. Status files are printed in any case.
NEW_BYTES_SCRIPT = r"""
LC_ALL=C
export LC_ALL
cd "$f" 2>/dev/null || exit 0
find {names} -maxdepth {depth} -type f ! -name '.*' ! -path '*
*' -printf '%s %p\n' 2>/dev/null | {
  while read -r s p; do
    [ "$r" -gt 0 ] || break
    case $p in
      */[.-]*|*[!A-Za-z0-9._/+=,@-]*|{importable}) continue;;
    esac
    [ "${#p}" -le {path_bytes} ] || continue
    case $p in
{known}
      *) o=-1;;
    esac
    case $p in
      status/*)
        [ "$s" -le {record_bytes} ] || continue
        o=0 c=$s;;
      attempts/[0-9][0-9][0-9][0-9][0-9][0-9].json)
        [ "$s" -le {record_bytes} ] && [ "$s" != "$o" ] || continue
        if [ "$o" -lt 0 ]; then
          [ "$k" -gt 0 ] || continue
          k=$((k - 1))
        fi
        o=0 c=$s
        [ "$c" -le "$r" ] || { r=0; break; }
        r=$((r - c - {path_bytes}));;
      attempts/*) continue;;
      *)
        [ "$s" -le {file_bytes} ] || s={file_bytes}
        [ "$s" -gt "$o" ] || continue
        if [ "$o" -lt 0 ]; then
          [ "$k" -gt 0 ] || continue
          k=$((k - 1)) o=0
        fi
        c=$((s - o))
        [ "$c" -le "$r" ] || c=$r
        r=$((r - c - {path_bytes}));;
    esac
    printf '%s\n%s\n' "$m" "$p"
    [ "$c" = 0 ] || dd if="$p" bs=65536 iflag=skip_bytes,count_bytes skip="$o" count="$c" status=none
  done
  e=end
  [ "$r" -gt 0 ] || e=more
  printf '%s\n%s\n' "$m" "$e"
}
"""


def new_bytes_script(
    folder: str, machine_names: Sequence[str], known_sizes: Mapping[str, int], delimiter: str, limit_bytes: int
) -> bytes:
    """Return the script that prints delimiter, path and new bytes of each mirrored file that has grown.

    Paths in `known_sizes` are relative to `folder`. Prints about `limit_bytes` of content, and whether there is more;
    the status files of the machines come first and do not count.
    """
    names = [*(f"status/{name}.json" for name in machine_names), "attempts", *LOG_FOLDERS]
    values = {
        "names": " ".join(quote_path(name) for name in names),
        "known": "\n".join(f"      {shlex.quote(path)}) o={size};;" for path, size in known_sizes.items()),
        "importable": "|".join(f"*{suffix}" for suffix in untrusted.IMPORTABLE_SUFFIXES),
        "depth": untrusted.MAX_PATH_DEPTH,
        "path_bytes": untrusted.MAX_PATH_BYTES,
        "record_bytes": untrusted.MAX_RECORD_BYTES,
        "file_bytes": untrusted.MAX_FILE_BYTES,
    }
    body = re.sub(r"\{([a-z_]+)\}", lambda match: str(values[match[1]]), NEW_BYTES_SCRIPT)
    new_files = max(0, untrusted.MAX_FILE_COUNT - len(known_sizes))
    return build_script(body, f=quote_path(folder), m=delimiter, r=str(limit_bytes), k=str(new_files))
