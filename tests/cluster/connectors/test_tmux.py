"""Sessions on the private tmux server, with the real tmux: arguments arrive, other sessions are not touched."""

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.connectors import tmux
from cluster.errors import ClusterError

DUMP_PROCESS = (
    "import json, os, sys, time; from pathlib import Path; to = Path(sys.argv[1]); "
    "text = json.dumps({'argv': sys.argv[2:], 'environ': dict(os.environ), 'cwd': os.getcwd()}); "
    "Path(str(to) + '.part').write_text(text); Path(str(to) + '.part').rename(to); time.sleep(1000)"
)
ARGUMENTS = [
    *("", "a b", "'", '"', "\\", "\\n", "$HOME", "`id`", "$(id)", "*", "~", "!", "=", "ä", "\n", "two\nlines", "\t"),
    *(";", "\\;", "a;", "; kill-server", "|", "#", "#{pane_id}", "#S", "#(id)", "%1", "100%", "{", "}", "-d", "--"),
]


@pytest.fixture
def dump_process(sandbox: Any) -> Any:
    """Start a process in a session or window that writes down its arguments, environment and folder; return these."""

    def start_and_dump(
        name: str, run_folder: Path, arguments: list[str], window: str = "first", as_window: bool = False
    ) -> Any:
        dump_path = sandbox.path / f"dump-{name}-{window}"
        argv = [sys.executable, "-c", DUMP_PROCESS, str(dump_path), *arguments]
        tmux.add_window(name, window, argv) if as_window else tmux.start_session(name, run_folder, window, argv)
        sandbox.wait_for(dump_path.exists)
        return json.loads(dump_path.read_text())

    return start_and_dump


def test_start_session_and_add_window_pass_arguments_unchanged_whatever_the_users_tmux_conf_says(
    sandbox: Any, dump_process: Any
) -> None:
    lines = ["default-shell /bin/false", "destroy-unattached on", "exit-unattached on", "remain-on-exit on"]
    config = "".join(f"set -g {line}\n" for line in [*lines, "base-index 1"])
    (Path(sandbox.env["HOME"]) / ".tmux.conf").write_text(config)
    run_folder = sandbox.path / "r\udcfcns of \xe9/job-1"
    assert dump_process("job-1", run_folder, ARGUMENTS)["argv"] == ARGUMENTS
    assert dump_process("job-1", run_folder, ARGUMENTS, window="second", as_window=True)["argv"] == ARGUMENTS
    assert sandbox.tmux("list-windows", "-t", "=job-1", "-F", "#W").split() == ["first", "second"]
    assert tmux.is_owned_by("job-1", run_folder)


def test_sessions_of_other_names_and_run_folders_are_left_alone(sandbox: Any, dump_process: Any) -> None:
    run_folder = sandbox.path / "runs/job-1"
    dump_process("job-1", run_folder, [])
    dump_process("job-11", run_folder.with_name("job-11"), [])
    before = sandbox.job_pids()
    for name, folder in (("job-1", run_folder.parent), ("job-", run_folder), ("job-11", run_folder), ("*", run_folder)):
        assert not tmux.is_owned_by(name, folder)
        tmux.kill_session(name, folder)
    with pytest.raises(ClusterError, match=r"^the tmux session job-1 belongs to [^\n]*$"):
        tmux.start_session("job-1", sandbox.path / "elsewhere/runs/job-1", "first", ["sleep", "1000"])
    assert tmux.is_owned_by("job-1", run_folder) and sandbox.job_pids() == before
    tmux.kill_session("job-1", run_folder)
    assert not tmux.is_owned_by("job-1", run_folder) and tmux.is_owned_by("job-11", run_folder.with_name("job-11"))
    sandbox.wait_for(lambda: len(sandbox.job_pids()) == 1)


def test_start_session_repeats_command_that_ending_server_lost(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends with its last session, and about 1 in 100 commands that follow at once is lost with it."""
    command = tmux.server_class().cmd
    to_lose = ["start-server"] * 3

    def lose_some(server: Any, name: str, *words: str) -> Any:
        if name in to_lose:
            to_lose.remove(name)
            return SimpleNamespace(stdout=[], stderr=["server exited unexpectedly"])
        return command(server, name, *words)

    monkeypatch.setattr(tmux.server_class(), "cmd", lose_some)
    tmux.start_session("job-1", sandbox.path, "first", ["sleep", "1000"])
    assert not to_lose and sandbox.tmux("list-sessions", "-F", "#S").split() == ["job-1"]
    to_lose += ["start-server"] * 100  # it keeps ending
    monkeypatch.setattr(tmux, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    with pytest.raises(ClusterError, match="server exited unexpectedly"):
        tmux.start_session("job-2", sandbox.path, "first", ["sleep", "1000"])


def test_kill_session_frozen_server_raises_one_line(
    sandbox: Any, dump_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump_process("job-1", sandbox.path, [])
    server = int(sandbox.tmux("display-message", "-p", "#{pid}"))
    os.kill(server, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch, pytest.raises(ClusterError, match="does not answer"):
            patch.setattr(tmux, "SERVER_TIMEOUT_SECONDS", 0.3)
            tmux.kill_session("job-1", sandbox.path)
    finally:
        os.kill(server, signal.SIGCONT)
    assert tmux.is_owned_by("job-1", sandbox.path)


def test_failing_tmux_is_not_read_as_no_session(sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tmux.session_names() == set() and tmux.session_owner("job-1") is None and tmux.window_names("job-1") == []
    (tmp_path / "tmux").write_text("#!/bin/sh\necho 'error connecting to /tmp/x (Permission denied)' >&2; exit 1\n")
    (tmp_path / "tmux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for ask in (tmux.session_names, lambda: tmux.window_names("job-1"), lambda: tmux.is_owned_by("job-1", tmp_path)):
        with pytest.raises(ClusterError, match="tmux -L imgnet: error connecting"):
            ask()


def test_tmux_that_is_too_old_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = "echo 'unknown option -- e' >&2; echo 'usage: new-session [-AdDEP] [command]' >&2"  # of tmux 2.7
    script = f"case $* in *new-session*) {usage};; *) echo 'no server running on /tmp/x' >&2;; esac; exit 1"
    (tmp_path / "tmux").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "tmux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ClusterError, match=r"^tmux -L imgnet: unknown option -- e .*; tmux 3\.2 or newer is needed"):
        tmux.start_session("job-1", tmp_path, "first", ["true"])
