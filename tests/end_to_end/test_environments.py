"""A whole job in environments other than the usual one: locale, terminal, folders, limits, as cron or a container has.

All commands run on a terminal of their own. Only root may make /tmp read-only, for the commands of a test alone.
"""

import os
import pty
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sandbox import COMMAND, Sandbox

# As `docker run --read-only --user 1234`: only the job's folder and that of tmux can be written, the user has no name.
CONTAINER = """
for file in /etc/passwd /etc/nsswitch.conf; do mount --bind /dev/null $file; done
mount --bind /tmp /tmp
for folder in "$PWD" "$TMUX_TMPDIR"; do mount --bind "$folder" "$folder"; done
mount -o remount,bind,ro /tmp; mount -o remount,bind,ro /; cd "$PWD"
"""
UNSET = None
ENVIRONMENTS: dict[str, tuple[dict[str, str | None], str]] = {
    "cron": ({"LC_ALL": "C", "LANG": UNSET, "TERM": UNSET, "HOME": "{home} of cron", "AWS_REGION": "x"}, "umask 077"),
    "ascii": (
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": "no-such-type"},
        'taskset -cp "$(taskset -cp $$ | sed "s/.*[ ,-]//")" $$',
    ),
    "no home": ({"HOME": "/proc/nonexistent", "TMPDIR": "/proc/nonexistent", "TERM": "vt100"}, "ulimit -n 64"),
    "container": ({"HOME": UNSET, "LOGNAME": UNSET, "USER": UNSET, "TMPDIR": "/proc"}, CONTAINER),
}


class Shell:
    """Runs commands in a sandbox's folder, each on a terminal of its own, after the shell lines of a preparation."""

    def __init__(self, folder: Path, environment: dict[str, str], preparation: str = "") -> None:
        self.folder, self.environment = folder, environment
        namespace = ["unshare", "-m"] if "mount" in preparation else []
        self.prefix = [*namespace, "sh", "-ec", f'{{ {preparation or ":"}\n}} >/dev/null; exec "$@"', "sh"]

    def __call__(self, *words: str, reply: Callable[[str], bytes] = lambda _: b"") -> tuple[int, str]:
        """Run a command to its end and return its exit code and what it showed. `reply` types after each output."""
        pid, terminal = pty.fork()
        if not pid:
            try:
                os.chdir(self.folder)
                os.execvpe(self.prefix[0], [*self.prefix, COMMAND, *words], self.environment)
            finally:
                os._exit(127)
        shown = b""
        try:
            while data := os.read(terminal, 1 << 16):
                shown += data
                os.write(terminal, reply(shown.decode(errors="replace")))
        except OSError:  # Linux reports in this way that all processes have closed the terminal
            pass
        os.close(terminal)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return exit_code, shown.decode(errors="replace").replace("\r", "")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_job_is_launched_attached_to_stopped_and_resumed_in_another_environment(sandbox: Sandbox, name: str) -> None:
    if name == "container" and (os.geteuid() or subprocess.run(["unshare", "-m", "true"]).returncode):
        pytest.skip("no mounts of our own: they take root")
    variables, preparation = ENVIRONMENTS[name]
    environment = dict(sandbox.env)
    for variable, value in variables.items():
        environment.pop(variable, None)
        if value is not None:
            environment[variable] = value.format(home=sandbox.env["HOME"])
    shell = Shell(sandbox.path, environment, preparation)
    sandbox.data = shutil.copytree(sandbox.data, sandbox.path / "data")
    for split in ("train", "val"):
        (sandbox.data / split / "disc").rename(sandbox.data / split / "k\u00e4fer")
    code, shown = shell("launch", "--local", "-y", "-d", sandbox.write_recipe(2, pace=(0, 1.0)))
    assert code == 0 and "job-1 launched" in shown, shown
    sandbox.wait_for_step(sandbox.job(), 1)

    code, shown = shell("attach", reply=lambda screen: b"\x02d" if "[job-1-" in screen else b"")
    assert code == 0 and "[detached" in shown, shown
    code, shown = shell("stop")
    assert code == 0 and "job-1 stopped" in shown, shown
    sandbox.wait_for(lambda: not sandbox.job_pids())
    sandbox.train_fast()
    code, shown = shell("resume", "-y")
    assert code == 0 and "job-1 done" in shown, shown
    assert "Traceback" not in shown and not sandbox.tmux("list-sessions")
    if name == "ascii":  # its classes have the same names in both locales
        ran, (code, shown) = sandbox.cli("eval"), shell("eval")
        assert ran.code == 0 and code == 0, (ran, shown)


def test_environment_without_what_is_needed_is_one_line(sandbox: Sandbox) -> None:
    recipe = sandbox.write_recipe(1)
    for variables, preparation, reason in (
        ({}, "PATH=/nowhere", "tmux is missing; install it"),
        ({"TMUX_TMPDIR": "/proc"}, ":", "couldn't create directory /proc/tmux-.*export TMUX_TMPDIR=FOLDER"),
        ({}, 'mkdir gone; cd gone; rmdir "$PWD"', "the current folder was deleted; change to another one"),
    ):
        shell = Shell(sandbox.path, sandbox.env | variables, preparation)
        code, shown = shell("launch", "--local", "-y", recipe)
        assert code == 1 and re.fullmatch(f"error: .*{reason}.*", shown.splitlines()[-1]), shown
    assert "Traceback" not in shown and not (sandbox.path / "runs").exists()
