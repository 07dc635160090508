"""A machine of the testbed in the hands of somebody else: it answers the question for new files as its owner likes."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from support.ssh_machines import TestMachine

# Stands for `sh` on the machine. Runs every script as it is, but answers that for new files with what the file "lie"
# has; MARK is the delimiter of the question. A lie of digits alone is a number of zeros, the lie "drip" a few zeros a
# second without end.
LYING_SHELL = """#!{python} -S
import os, re, sys, time
start = re.match(r"echo; echo ([0-9a-f]+);.*head -c ([0-9]+)[)]", sys.argv[2]) if sys.argv[1:2] == ["-c"] else None
if not start:
    os.execv("/bin/sh", ["sh", *sys.argv[1:]])
first_line = "\\n" + start[1] + "\\n"  # of each answer; the question begins with the same line
sys.stdout.write(first_line)
sys.stdout.flush()
script = b""
size = len(first_line) - 1 + int(start[2])
while len(script) < size:
    script += os.read(0, size - len(script))
script = script.partition(b"\\n")[2]
mark = re.search(rb"\\bm=([0-9a-f]+)", script)
lie = open({lie!r}, "rb").read()
if not mark or b"skip_bytes" not in script:
    os.execv("/bin/sh", ["sh", "-c", script])
try:
    while lie == b"drip":
        os.write(1, bytes(1))
        time.sleep(0.2)
    if lie.isdigit():
        for _ in range(int(lie) >> 20):
            sys.stdout.buffer.write(bytes(1 << 20))
    else:
        sys.stdout.buffer.write(lie.replace(b"MARK", mark[1]))
    sys.stdout.flush()
except BrokenPipeError:
    os._exit(1)
"""


@contextlib.contextmanager
def lying(machine: TestMachine) -> Iterator[Path]:
    """Let a machine answer each question for new files with a lie: the content of the file that this yields."""
    folder = machine.folder / "lies"
    folder.mkdir(exist_ok=True)
    (folder / "lie").write_bytes(b"")
    shell = folder / "sh"
    shell.write_text(LYING_SHELL.format(python=sys.executable, lie=str(folder / "lie")))
    shell.chmod(0o755)
    honest = dict(machine._variables)
    try:
        _restart(machine, {**honest, "PATH": os.pathsep.join([str(folder), honest["PATH"]])})
        yield folder / "lie"
    finally:
        _restart(machine, honest)


def _restart(machine: TestMachine, variables: dict[str, str]) -> None:
    machine.write_config(variables)
    machine.unplug()
    machine.plug()


def lie_about(path: str | Path, content: bytes = b'{"owned": true}\n') -> bytes:
    return b"MARK\n" + os.fsencode(str(path)) + b"\n" + content + b"MARK\nend\n"
