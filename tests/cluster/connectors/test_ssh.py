"""The ssh connector against the real sshd of the testbed: commands, dropped connections, files, login, errors."""

import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ssh_machines import Testbed, command_line, testbed
from support.waiting import wait_for

from cluster.connectors import ssh, ssh_channel, ssh_config, ssh_connection, untrusted
from cluster.connectors import ssh_scripts as sh
from cluster.connectors.hosts_file import Host, Hosts, read_hosts
from cluster.connectors.ssh import CommandFailed, SSHConnector, SSHRefused, Unreachable
from cluster.connectors.ssh_channel import SSHChannel
from cluster.connectors.ssh_config import openssh_argv, resolve_route, write_ssh_config
from cluster.connectors.untrusted import BadAnswer
from cluster.errors import ClusterError
from train.tools.process import descendant_pids

__all__ = ["testbed"]  # the fixture
PRINT_ARGV = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"


@pytest.fixture(scope="module")
def shared_bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Three machines for all tests of this file; no test may take them down."""
    with Testbed(tmp_path_factory.mktemp("beds") / "bed", 3) as bed:
        yield bed


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The connecting user's home, without keys, ssh-agent or known hosts."""
    home = tmp_path / "my home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


def hosts(bed: Testbed, **extra: Any) -> Hosts:
    return read_hosts(bed.write_hosts_toml(bed.folder / f"hosts-{time.monotonic_ns()}.toml", **extra))


def host(bed: Testbed, number: int = 0, **changes: Any) -> Host:
    return replace(hosts(bed).machines[number], **changes)


@pytest.fixture
def machine(shared_bed: Testbed) -> Iterator[SSHConnector]:
    with SSHConnector(host(shared_bed), "machine 0 (here)", reconnect_seconds=5) as connector:
        yield connector


@pytest.fixture
def server(testbed: Callable[..., Testbed]) -> Any:
    """A machine of this test's own: its testbed object."""
    return testbed(1).machines[0]


@pytest.fixture
def connector(server: Any) -> Iterator[SSHConnector]:
    with SSHConnector(host(server.bed), "machine 0 (own)", reconnect_seconds=20) as connector:
        yield connector


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that wait while the test does something to the machine."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def kill_one(server: Any, words: str) -> None:
    (pid,) = wait_for(lambda: server.processes(words))
    os.kill(pid, signal.SIGKILL)


# --- commands -----------------------------------------------------------------------------------------------------

ARGUMENTS = [
    *("", " ", "'", '"', "\\", "$HOME", "`id`", "$(id)", ";", "&& false", "*", "~", "#", "a=b"),
    *("\n", "\n\n", "-n", "ä", "\udcff"),
]


def test_run_passes_arguments_unchanged(machine: SSHConnector) -> None:
    """Also more than a login shell takes."""
    arguments = [*ARGUMENTS, *(f"{number} " + "x" * 90 for number in range(10_000))]
    stdout = machine.run([sys.executable, "-c", PRINT_ARGV, *arguments], timeout=120).out
    assert stdout == b"\0".join(map(os.fsencode, arguments))


def test_run_returns_code_and_binary_outputs_and_leaves_nothing(machine: SSHConnector, shared_bed: Testbed) -> None:
    server, content = shared_bed.machines[0], os.urandom(300_001)
    argv = ["sh", "-c", 'cat; echo "$HOME $PWD" >&2; exit 7']
    result = machine.run(argv, check=False, input=content)
    assert (result.argv, result.code, result.out) == (tuple(argv), 7, content)
    assert result.err.decode() == f"{server.home} {server.home}\n"
    assert machine.run(["cat"]).out == b""
    wait_for(lambda: not list((server.home / ".imgnet/commands").iterdir()) and not server.leaked_pids())


@pytest.mark.parametrize("stream", ["", ">&2"])
def test_run_longer_output_than_allowed_is_dropped(connector: SSHConnector, stream: str) -> None:
    with pytest.raises(BadAnswer, match=r"machine 0 \(own\): its answer was dropped: it has 20 MB, the limit is 4 MB"):
        connector.run(["sh", "-c", f"head -c 20000000 /dev/zero {stream}"])
    assert connector.run(["echo", "on"]).out == b"on\n"


@pytest.mark.parametrize("timeout", [None, 9.0])
def test_run_returns_exit_codes_and_negative_signals(machine: SSHConnector, timeout: float | None) -> None:
    # "exit" is no builtin of a shell here.
    codes: dict[tuple[str, ...], int] = {("no-program-of-this-name",): 127, ("/tmp",): 126, ("exit",): 127}
    codes |= {("sh", "-c", f"ulimit -c 0; kill -{number} $$"): -number for number in (2, 9, 13)}
    for argv, code in codes.items():
        assert machine.run(argv, check=False, timeout=timeout).code == code, argv


def test_run_failure_shows_last_ten_lines(machine: SSHConnector) -> None:
    with pytest.raises(CommandFailed) as caught:
        machine.run(["sh", "-c", "seq 20; echo the reason >&2; exit 3"])
    lines = str(caught.value).splitlines()
    assert lines == ["machine 0 (here): sh ended with code 3", *map(str, range(12, 21)), "the reason"]


def test_run_timeout_kills_command_and_children(machine: SSHConnector, shared_bed: Testbed) -> None:
    out = b""
    for timeout in (0.3, 3.0, 30.0):  # a busy computer may take longer than the first to start sh
        with pytest.raises(CommandFailed, match=rf"not over in {timeout:g} s") as caught:
            machine.run(["sh", "-c", "echo begun; sleep 4321 & wait"], timeout=timeout, check=False)
        if out := caught.value.result.out:
            break
    assert out == b"begun\n"
    wait_for(lambda: not shared_bed.machines[0].processes("sleep"))


def test_run_does_not_wait_for_background_processes(machine: SSHConnector, shared_bed: Testbed) -> None:
    assert machine.run(["sh", "-c", "sleep 4322 & echo $!"], timeout=120).out
    kill_one(shared_bed.machines[0], "sleep 4322")


@pytest.mark.parametrize("greeting", ["echo welcome to the machine", "printf 'no end of line'", "seq 50000"])
def test_answers_begin_after_what_the_login_shell_prints(greeting: str, server: Any, connector: SSHConnector) -> None:
    (server.home / ".bashrc").write_text(f"{greeting}; echo oh dear >&2\n")
    result = connector.run(["sh", "-c", "echo said"])
    assert (result.out, result.err) == (b"said\n", b"")
    content = bytes(range(256)) * 3000
    connector.write("~/folder/file", content)
    assert connector.read_from("~/folder/file", 0) == content and connector.read_from("~/folder/none", 0) == b""
    assert connector.list_files("~/folder") == {"file": len(content)}
    assert connector.run_repeatable("echo repeated") == b"repeated\n"
    connector.write("~/job/logs/a.log", b"line\n")
    assert connector.read_new_bytes("~/job", ["0"], {}).contents == {"logs/a.log": b"line\n"}


def test_run_waits_for_a_free_sshd_session(server: Any, connector: SSHConnector, pool: ThreadPoolExecutor) -> None:
    server.configure("MaxSessions 2\n")
    scripts = [f"sleep 0.05; echo {number}" for number in range(8)]
    stdout = list(pool.map(lambda script: connector.run(["sh", "-c", script]).out, scripts))
    assert stdout == [f"{number}\n".encode() for number in range(8)]
    assert server.log.count("Accepted publickey") == 1


@pytest.mark.parametrize(("config", "start_up_file", "problem"), [
    ("ForceCommand echo Closed. >&2; exit 1\n", "", "its login shell runs no commands: Closed."),
    ("ForceCommand echo Closed.\n", "", "its login shell runs no commands: code 0"),
    ("", "read -r line\n", "its start-up files read from stdin; let only interactive shells do that"),
])  # fmt: skip
def test_login_shell_that_runs_no_scripts_is_one_line(
    server: Any, connector: SSHConnector, config: str, start_up_file: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script of which a start-up file has read a part does not run. A forced command has ended before it is sent."""
    server.configure(config)
    send = SSHChannel.send

    def send_late(channel: SSHChannel, content: bytes) -> None:
        wait_for(lambda: channel.paramiko_channel.closed)
        send(channel, content)

    if config:
        monkeypatch.setattr(SSHChannel, "send", send_late)
    (server.home / ".bashrc").write_text(start_up_file)
    for ask in (lambda: connector.run(["true"]), lambda: connector.write("~/file", b"\ntouch ~/ran\n" * 1000)):
        with pytest.raises(ClusterError) as caught:
            ask()
        assert str(caught.value).startswith("machine 0 (own): ") and str(caught.value).endswith(problem)
    assert not (server.home / "ran").exists() and not (server.home / "file").exists()


# --- a connection that drops --------------------------------------------------------------------------------------


def test_run_survives_cut_connection_and_runs_once(
    server: Any, connector: SSHConnector, pool: ThreadPoolExecutor
) -> None:
    wait = "while [ ! -e go ]; do sleep 0.01; done"
    script = f"echo ran >>ran; head -c 3000000 /dev/zero; {wait}; cat; echo end >&2; exit 5"
    future = pool.submit(connector.run, ["sh", "-c", script], check=False, input=b"in")
    for _ in range(2):
        wait_for(lambda: (server.home / "ran").exists() and server.cut())
        wait_for(lambda: len(server.sshd_pids()) > 1)
    (server.home / "go").touch()
    result = future.result(120)
    assert (server.home / "ran").read_text() == "ran\n"
    assert (result.code, result.out, result.err) == (5, bytes(3_000_000) + b"in", b"end\n")


def test_run_resends_truncated_input(server: Any, connector: SSHConnector, pool: ThreadPoolExecutor) -> None:
    connector.max_output_bytes = 100_000_000
    content = os.urandom(20_000_000)
    connector.run(["true"])
    future = pool.submit(connector.run, ["tee", "-a", "kept"], input=content)
    wait_for(lambda: [path for path in (server.home / ".imgnet/commands").glob(".*") if path.stat().st_size])
    server.cut()
    assert future.result(120).out == content == (server.home / "kept").read_bytes()


def test_run_script_late_first_call_runs_nothing(tmp_path: Path) -> None:
    def call(is_retry: bool) -> bytes:
        argv = ["sh", "-c", f"echo ran >>'{tmp_path}/ran'"]
        script = sh.run_script("a-task", f"{tmp_path}/f", argv, is_retry=is_retry)
        return subprocess.run(["sh", "-c", script], input=b"\n", stdout=subprocess.PIPE, timeout=120).stdout

    assert call(is_retry=True) == b"\na-task 0 0 0\n"
    call(is_retry=False)
    assert (tmp_path / "ran").read_text() == "ran\n"


def test_end_commands_ends_those_of_its_job_and_lets_no_more_begin(
    server: Any, connector: SSHConnector, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a process has started which was killed, and whatever their processes do with SIGTERM."""
    monkeypatch.setattr(sh, "END_GRACE_SECONDS", 0.5)
    connector.owner = "job-2-00000000"
    jobs = [SSHConnector(connector.host, "machine 0 (own)", 20, "job-1-00000000", "first") for _ in range(2)]
    tidy, deaf, other = (
        pool.submit(job.run, ["sh", "-c", script], check=False)
        for job, script in (
            (jobs[0], "trap 'touch tidy; exit 5' TERM; touch ran1; while :; do sleep 0.05; done"),
            (jobs[0], "trap '' TERM; touch ran2; while :; do sleep 0.05; done"),
            (connector, "touch ran3; until [ -e end3 ]; do sleep 0.05; done"),
        )
    )
    wait_for(lambda: all((server.home / f"ran{number}").exists() for number in (1, 2, 3)))
    assert jobs[1].end_commands("echo over") == b"over\n"
    assert (tidy.result(120).code, deaf.result(120).code) == (5, -9) and (server.home / "tidy").exists()
    for job in jobs:
        with pytest.raises(ClusterError, match="the job has ended"):
            job.run(["touch", "late"])
    jobs[1].launch = "second"
    assert jobs[1].run(["echo", "again"]).out == b"again\n"
    assert not (server.home / "late").exists() and not other.done()
    (server.home / "end3").touch()
    assert other.result(120).code == 0
    for job in jobs:
        job.close()


def test_answer_that_drips_gets_little_more_time(
    server: Any, connector: SSHConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many bytes the machine may send in all."""
    monkeypatch.setattr(ssh, "DEADLINE_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(ssh, "MAX_COUNTED_BYTES", 1000)
    monkeypatch.setattr(ssh_channel, "SLOWEST_BYTES_PER_SECOND", 1000)
    script = b"while head -c 1000 /dev/zero; do sleep 0.1; done"
    monkeypatch.setattr(sh, "run_script", lambda *_, **__: script)
    with pytest.raises(Unreachable, match=r"\d+ bytes in \d+ s, and no end"):
        connector.run(["anything"], timeout=0.1)


def test_run_reports_sigkill_after_power_loss(server: Any, connector: SSHConnector, pool: ThreadPoolExecutor) -> None:
    future = pool.submit(connector.run, ["sh", "-c", "touch ran; exec sleep 4323"], check=False)
    wait_for(lambda: (server.home / "ran").exists())
    server.power_off()
    server.boot()
    assert future.result(120).code == -9


@pytest.mark.parametrize(("fault", "timeout", "message"), [
    ("unplug", None, r"machine 0 \(own\): cannot be reached at 127.1.0.1 port.*; sh may still run there"),
    ("freeze", 2.0, r"does not answer: \d+ bytes in \d+ s, and no end; is it frozen\?; sh may still run there"),
    ("freeze", None, "cannot be reached"),
], ids=["unplugged", "frozen until the deadline", "frozen and asked by keep-alive requests"])  # fmt: skip
def test_run_on_a_machine_that_is_gone_raises_unreachable(
    server: Any,
    connector: SSHConnector,
    fault: str,
    timeout: float | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ssh, "DEADLINE_GRACE_SECONDS", 0.5)
    if not timeout:
        monkeypatch.setattr(ssh_connection, "KEEPALIVE_TIMEOUT_SECONDS", 0.5)
        monkeypatch.setattr(ssh_connection, "KEEPALIVE_SECONDS", 0.2)
    connector.reconnect_seconds = 0.5
    threading.Thread(target=lambda: (wait_for((server.home / "ran").exists), getattr(server, fault)())).start()
    with pytest.raises(Unreachable, match=message):
        connector.run(["sh", "-c", "touch ran; exec sleep 4324"], timeout=timeout)
    server.thaw()
    server.plug()
    connector.reconnect_seconds = 20.0
    assert connector.run(["echo", "back"]).out == b"back\n"
    if timeout:
        wait_for(lambda: not server.processes("sleep 4324"))  # the machine keeps the deadline by itself
    else:
        kill_one(server, "sleep 4324")


def test_write_and_read_from_survive_cut_connections(server: Any, connector: SSHConnector) -> None:
    content = os.urandom(30_000_000)
    stop = threading.Event()

    def cut() -> None:
        for _ in range(3):
            wait_for(lambda: stop.is_set() or len(server.sshd_pids()) > 1)
            stop.wait(0.1)
            server.cut()

    thread = threading.Thread(target=cut)
    thread.start()
    connector.write("~/b", content)
    received = b""
    while part := connector.read_from("~/b", len(received)):
        received += part
    stop.set()
    thread.join()
    assert received == content


# --- files --------------------------------------------------------------------------------------------------------


def test_write_replaces_whole_files(machine: SSHConnector, shared_bed: Testbed) -> None:
    folder = shared_bed.machines[0].home / "new/fol 'der"
    for path, content in {"~/new/fol 'der/a": os.urandom(100_000), f"{folder}/a": b""}.items():
        machine.write(path, content)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": content}


def test_write_failure_raises_one_line(machine: SSHConnector) -> None:
    with pytest.raises(ClusterError, match=r"^machine 0 \(here\): /proc/a/b: mkdir: .*$"):
        machine.write("/proc/a/b", b"a")
    with pytest.raises(ClusterError, match=r"^machine 0 \(here\): /tmp: is a folder$"):
        machine.write("/tmp", b"a" * 5_000_000)


def test_received_bytes_count_what_the_machine_sends(machine: SSHConnector, tmp_path: Path) -> None:
    content, path = bytes(range(256)) * 8000, str(tmp_path / "f")
    before = machine.received_bytes
    machine.write(path, content)
    assert machine.received_bytes - before < 10_000, "what is sent there costs nothing"
    for read in (lambda: machine.read_from(path, 0), lambda: machine.run(["cat", path]).out):
        before = machine.received_bytes
        assert read() == content
        assert len(content) <= machine.received_bytes - before < 1.02 * len(content)


def test_list_files_returns_sizes_by_relative_path(machine: SSHConnector, tmp_path: Path) -> None:
    names = ("a", "logs/b c", "logs/deep/ä", ".hid/seen", "logs/.hidden", "events/new\nline")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for link, target in {"to nowhere": "nothing", "to a": "a", "to logs": "logs"}.items():
        (tmp_path / link).symlink_to(target)
    sizes = {**{name: len(name.encode()) for name in names}, "to a": 1}
    assert machine.list_files(str(tmp_path)) == sizes
    assert machine.list_files(str(tmp_path / "none")) == {}


def test_read_new_bytes_returns_growth_of_each_file(machine: SSHConnector, tmp_path: Path) -> None:
    def new(known_sizes: Mapping[str, int]) -> Mapping[str, bytes]:
        new_bytes = machine.read_new_bytes(str(tmp_path / "f"), [], known_sizes)
        assert new_bytes.is_complete
        return new_bytes.contents

    assert new({}) == {}
    files = {"logs/a": b"1234", "logs/b=c": b"xy\n", "events/d/e": b""}
    for name, content in {**files, **dict.fromkeys(("other/f", "logs/.g", "logs/h.py"), b"")}.items():
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "f" / name).write_bytes(content)
    assert new({}) == files
    all_bytes = bytes(range(256)) * 100
    (tmp_path / "f/logs/a").write_bytes(b"1234" + all_bytes)
    assert new({"logs/a": 4, "logs/b=c": 1, "events/d/e": 0}) == {"logs/a": all_bytes, "logs/b=c": b"y\n"}


def test_read_new_bytes_is_limited_and_continues(machine: SSHConnector, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    content = {f"logs/{name}": os.urandom(700) for name in "abc"}
    for name, text in content.items():
        (tmp_path / name).write_bytes(text)
    received: dict[str, bytes] = {}
    for _ in range(3):
        assert received != content
        known_sizes = {name: len(text) for name, text in received.items()}
        new = machine.read_new_bytes(str(tmp_path), [], known_sizes, 1000).contents
        assert 0 < sum(map(len, new.values())) <= 1000
        received |= {name: received.get(name, b"") + text for name, text in new.items()}
    assert received == content


def test_read_new_bytes_of_a_job_with_the_most_files_leaves_out_new_ones(
    machine: SSHConnector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also new attempt files; a status is read in any case, because its copy is overwritten."""
    monkeypatch.setattr(untrusted, "MAX_FILE_COUNT", 2)
    for name in ("logs/a", "logs/b", "attempts/000001.json", "status/0.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    known_sizes = {"logs/a": 1, "logs/b": 1}
    new = machine.read_new_bytes(str(tmp_path), ["0"], known_sizes)
    assert new.contents == {"status/0.json": b"{}", "logs/a": b"}", "logs/b": b"}"}
    assert "attempts/000001.json" in machine.read_new_bytes(str(tmp_path), ["0"], {"logs/a": 2}).contents


# --- login and host keys ------------------------------------------------------------------------------------------


def refusal_line(host: Host, kind: type[ClusterError] = SSHRefused, reconnect_seconds: float = 0.2) -> str:
    with SSHConnector(host, "machine 2 (gpu3)", reconnect_seconds) as connector, pytest.raises(ClusterError) as caught:
        connector.run(["true"])
    line = str(caught.value)
    assert isinstance(caught.value, kind) and "\n" not in line
    assert line.startswith(("machine 2 (gpu3): ", "the jump host"))
    return line


def can_connect(host: Host) -> bool:
    with SSHConnector(host, reconnect_seconds=5) as connector:
        return connector.run(["echo", "in"]).out == b"in\n"


def write_user_config(bed: Testbed, home: Path, options: str) -> None:
    server = bed.machines[0]
    login = f"Host gpu\n HostName {server.address}\n Port {server.port}\n User root\n "
    (home / ".ssh/config").write_text(login + options)


def test_missing_openssh_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match=r"^ssh is missing; install it: sudo apt-get install openssh-client \(Deb"):
        resolve_route(Host(host="127.0.0.1"))


def test_ssh_configuration_may_have_bytes_that_are_no_text(home: Path) -> None:
    (home / ".ssh/config").write_bytes(b"Host gpu\n IdentityFile ~/of-\xfcser\n")
    assert resolve_route(Host(host="gpu")).key_files == (home / "of-\udcfcser",)


def test_connect_accepts_host_key_of_known_hosts_unless_it_is_revoked(shared_bed: Testbed, home: Path) -> None:
    path = shared_bed.known_hosts(home / ".ssh/known_hosts")
    subprocess.run(["ssh-keygen", "-H", "-f", str(path)], check=True, capture_output=True)  # hashes the names
    assert can_connect(host(shared_bed, host_key=None))
    path.write_text(path.read_text() + f"  @revoked * {shared_bed.machines[0].host_key}\n")
    assert "is marked as revoked" in refusal_line(host(shared_bed, host_key=None))


def test_connect_accepts_a_host_key_known_without_the_port_as_openssh_does(shared_bed: Testbed, home: Path) -> None:
    server, other_server = shared_bed.machines[:2]
    known_hosts = home / ".ssh/known_hosts"
    openssh = ["ssh", "-F", "none", "-i", str(shared_bed.key), "-o", f'UserKnownHostsFile="{known_hosts}"']
    openssh += ["-o", "BatchMode=yes", "-p", str(server.port), f"root@{server.address}", "true"]
    for key, is_known in ((server.host_key, True), (other_server.host_key, False)):
        known_hosts.write_text(f"{server.address} {key}\n")
        assert (subprocess.run(openssh, capture_output=True).returncode == 0) == is_known, "what OpenSSH's client does"
        if is_known:
            assert can_connect(host(shared_bed, host_key=None))
        else:
            assert "its host key is not known" in refusal_line(host(shared_bed, host_key=None))


@pytest.mark.parametrize("pinned", [False, True])
def test_connect_changed_host_key_is_refused_with_remedy(shared_bed: Testbed, home: Path, pinned: bool) -> None:
    server, other_server = shared_bed.machines[:2]
    (home / ".ssh/known_hosts").write_text(f"[{server.address}]:{server.port} {other_server.host_key}\n")
    line = refusal_line(host(shared_bed, host_key=other_server.host_key if pinned else None))
    assert "its host key has CHANGED: it offers SHA256:" in line
    if pinned:
        words = ("hosts.toml has", f'host_key = "{server.host_key}"')
    else:
        words = ("known_hosts line 1 has", f"ssh-keygen -f {home}/.ssh/known_hosts -R '[{server.address}]:")
    assert all(word in line for word in words)


def test_connect_refusals_name_the_remedy(shared_bed: Testbed, home: Path) -> None:
    server, gate = shared_bed.machines[:2]
    stranger, locked = shared_bed.new_key("stranger"), shared_bed.new_key("locked", "secret")
    shared_bed.authorize(locked)
    for changes, words in (
        ({"host_key": None}, f"echo '[{server.address}]:{server.port} {server.host_key}' >> '{home}/.ssh/known_hosts'"),
        ({"host_key": None}, f'in hosts.toml: host_key = "{server.host_key}"'),
        ({"jump": f"root@{gate.address}:{gate.port}"}, "of machine 2 (gpu3): its host key is not known: it offers SHA"),
        ({"key": str(stranger)}, f" in with {stranger}; try: ssh-copy-id -p "),
        ({"key": "/no/key"}, "the key /no/key does not exist; make it: ssh-keygen -f /no/key"),
        ({"key": None}, "there is no key to log in with"),
        ({"key": str(locked)}, f"the key {locked} has a passphrase; give it to ssh-agent: ssh-add {locked}"),
    ):
        assert words in refusal_line(host(shared_bed, **changes))
    (home / ".ssh/known_hosts").write_text(f"@cert-authority * {gate.host_key}\n")
    (home / ".ssh/config").write_text("HostKeyAlias node\n")
    line = refusal_line(host(shared_bed, host_key=None))
    assert "(a @cert-authority of known_hosts is not read here, only the key itself)" in line
    (remedy,) = re.findall(r"echo .* >> '.*?'", line)
    subprocess.run(["sh", "-c", remedy], check=True)
    assert can_connect(host(shared_bed, host_key=None))
    (home / ".ssh/config").write_text("StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n")
    assert "then accept it: in hosts.toml: host_key =" in refusal_line(host(shared_bed, host_key=None))


@pytest.mark.parametrize(("key_file", "options"), [
    (".ssh/id_ed25519", "UserKnownHostsFile ~/.ssh/mine"),
    ("keys/gpu of root", 'UserKnownHostsFile /none "{home}/.ssh/mine"\n IdentityFile "{home}/keys/%n of %r"'),
    ("keys/gpu of root", 'UserKnownHostsFile ~/.ssh/mine\n IdentityFile "{home}/keys/${{KEY_NAME}}"'),
    (f"keys/{os.getuid()}-{socket.gethostname()}", 'UserKnownHostsFile ~/.ssh/mine\n IdentityFile "%d/keys/%i-%l"'),
], ids=["default key", "tokens", "variable", "local tokens"])  # fmt: skip
def test_connect_reads_the_users_ssh_config(
    shared_bed: Testbed, home: Path, key_file: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_NAME", "gpu of root")
    shared_bed.known_hosts(home / ".ssh/mine")
    (home / "keys").mkdir()
    (home / key_file).write_bytes(shared_bed.key.read_bytes())
    (home / key_file).chmod(0o600)
    write_user_config(shared_bed, home, options.format(home=home))
    assert can_connect(Host(host="gpu"))
    assert "refused" in refusal_line(Host(host="gpu", port=1), Unreachable), "hosts.toml wins"


@pytest.mark.parametrize("is_expired", [False, True])
def test_connect_offers_a_key_with_its_certificates_and_alone(server: Any, home: Path, is_expired: bool) -> None:
    bed, machine = server.bed, host(server.bed)
    authority, key = bed.new_key("authority"), bed.new_key("member")
    validity = ["-V", "20200101:20200102"] if is_expired else []
    certify = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", str(machine.user), *validity, f"{key}.pub"]
    subprocess.run(certify, check=True)
    if is_expired:
        bed.authorize(key)
    else:
        key.with_name("member-cert.pub").rename(home / "signed.pub")
        (home / ".ssh/config").write_text(f'CertificateFile "{home}/signed.pub"\n')
    server.configure(f"TrustedUserCAKeys {authority}.pub\n")
    assert can_connect(replace(machine, key=str(key)))


PROXY_COMMAND = 'ProxyCommand ssh -F "$HOME/.ssh/config" -W %h:%p gate0 2>/dev/null'  # needs a shell


def write_gates(bed: Testbed, home: Path, way: str) -> None:
    """Write ~/.ssh/config: machines 1 and 2 are the hosts gate0 and gate1, and machine 0 has the option `way`."""
    target, *gates = (bed.machines[number] for number in (0, 1, 2))
    known_hosts = bed.known_hosts(home / ".ssh/known_hosts")
    login = f'User root\n IdentityFile {bed.key}\n UserKnownHostsFile "{known_hosts}"\n'
    text = "".join(
        f"Host gate{number}\n HostName {gate.address}\n Port {gate.port}\n {login}" for number, gate in enumerate(gates)
    )
    (home / ".ssh/config").write_text(f"{text}Host {target.address}\n {way}\n")


def test_connection_ends_with_its_proxy_command_and_is_made_again(shared_bed: Testbed, home: Path) -> None:
    write_gates(shared_bed, home, PROXY_COMMAND)
    with SSHConnector(host(shared_bed), reconnect_seconds=5) as connector:
        connector.run(["true"])
        connection = connector._connect()
        (pid,) = [pid for pid in descendant_pids(os.getpid()) if command_line(pid).startswith("ssh -F")]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not connection.is_alive)
        assert connector.run(["echo", "in"]).out == b"in\n"
    wait_for(lambda: not [pid for pid in descendant_pids(os.getpid()) if command_line(pid).startswith("ssh -F")])


@pytest.mark.parametrize("how", ["hosts.toml", "ProxyJump", "ProxyCommand", "two"])
def test_connect_through_jump_hosts_and_proxy_commands(shared_bed: Testbed, home: Path, how: str) -> None:
    gates = shared_bed.machines[1:]
    write_gates(shared_bed, home, {"ProxyJump": "ProxyJump gate0", "ProxyCommand": PROXY_COMMAND}.get(how, ""))
    jump = {"hosts.toml": f"root@{gates[0].address}:{gates[0].port}", "two": "gate0,gate1"}.get(how)
    before = [gate.log.count("Accepted") for gate in gates]
    assert can_connect(host(shared_bed, jump=jump))
    passed = [gate.log.count("Accepted") - count for gate, count in zip(gates, before, strict=True)]
    assert passed == ([1, 1] if how == "two" else [1, 0])


@pytest.mark.parametrize("what", ["closed", "silent", "not ssh", "no name"])
def test_connect_without_ssh_server_raises_unreachable(
    shared_bed: Testbed, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.1.0.9", 0)) as listener:
        port = listener.getsockname()[1]
        if what == "closed":
            listener.close()
        if what == "not ssh":
            threading.Thread(target=lambda: listener.accept()[0].sendall(b"HTTP/1.1 400\r\n" * 200)).start()
        name = "no-such-host.invalid" if what == "no name" else "127.1.0.9"
        line = refusal_line(host(shared_bed, host=name, port=port), Unreachable)
    assert f"cannot be reached at {name} port {port}: " in line


def test_connections_that_failed_or_were_closed_leave_nothing_in_memory(shared_bed: Testbed) -> None:
    """A supervisor makes thousands of them in a day: one for each try to reach a machine that boots."""
    own_host, rounds = host(shared_bed), 5
    with socket.create_server(("127.1.0.9", 0)) as listener:
        closed_host = host(shared_bed, host="127.1.0.9", port=listener.getsockname()[1])

    def connect_to_both() -> None:
        assert can_connect(own_host)
        with pytest.raises(Unreachable):
            ssh_connection.connect(resolve_route(closed_host), "machine 1")

    def count_objects() -> Counter[type]:
        gc.collect()
        return Counter(map(type, gc.get_objects()))

    def left_objects() -> dict[type, int]:
        return {kind: number for kind, number in (count_objects() - before).items() if number >= rounds}

    connect_to_both()
    before = count_objects()
    for _ in range(rounds):
        connect_to_both()
    wait_for(lambda: not left_objects(), describe=lambda: str(left_objects()))  # until their threads have ended


# --- ssh-agent ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent(shared_bed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of an ssh-agent with three keys: one that asks its user, in vain; a wrong one; and the right one."""
    path = tmp_path_factory.mktemp("agent") / "agent.sock"
    keys = {name: shared_bed.new_key(name) for name in ("asking", "wrong", "right")}
    for name in ("asking", "right"):
        shared_bed.authorize(keys[name])
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        wait_for(path.exists)
        for options in (["-c", str(keys["asking"])], [str(keys["wrong"])], [str(keys["right"])]):
            environment = {**os.environ, "SSH_AUTH_SOCK": str(path)}
            subprocess.run(["ssh-add", "-q", *options], env=environment, check=True, capture_output=True)
        yield path
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("config, variable, is_let_in", [
    ("", "SSH_AUTH_SOCK", True),
    ("IdentityAgent SSH_AUTH_SOCK", "SSH_AUTH_SOCK", True),
    ("IdentityAgent $OTHER_AGENT", "OTHER_AGENT", True),
    ('IdentityAgent "{agent}"', "OTHER_AGENT", True),
    ("IdentityFile {keys}/right.pub\nIdentitiesOnly yes", "SSH_AUTH_SOCK", True),
    ("IdentityFile {folder}/only-in-agent\nIdentitiesOnly yes", "SSH_AUTH_SOCK", True),
    ("IdentityFile {folder}/locked", "SSH_AUTH_SOCK", True),
    ("IdentityFile {keys}/wrong.pub\nIdentitiesOnly yes", "SSH_AUTH_SOCK", False),
    ("IdentityAgent none", "SSH_AUTH_SOCK", False),
    ("IdentityAgent /nonexistent/agent.sock", "SSH_AUTH_SOCK", False),
])  # fmt: skip
def test_keys_of_an_agent_are_offered_as_openssh_offers_them(
    config: str,
    variable: str,
    is_let_in: bool,
    shared_bed: Testbed,
    agent: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, str(agent))
    right = shared_bed.folder / "right"
    shutil.copy(right, tmp_path / "locked")
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(tmp_path / "locked")], check=True)
    shutil.copy(right.with_name("right.pub"), tmp_path / "only-in-agent.pub")
    options = config.format(folder=tmp_path, keys=shared_bed.folder, agent=agent)
    write_user_config(shared_bed, home, f'UserKnownHostsFile "{shared_bed.known_hosts(home / ".ssh/mine")}"\n{options}')
    openssh = ["ssh", "-F", str(home / ".ssh/config"), "-o", "BatchMode=yes", "gpu", "true"]
    assert (subprocess.run(openssh, capture_output=True).returncode == 0) == is_let_in, "what OpenSSH's client does"
    if is_let_in:
        assert can_connect(Host(host="gpu"))
    else:
        refusal_line(Host(host="gpu"))
    write_ssh_config([resolve_route(Host(host="gpu"))], tmp_path / "job/ssh_config")
    argv = openssh_argv(tmp_path / "job/ssh_config", 0, ["true"], tty=False)
    completed = subprocess.run([*argv[:1], "-o", "BatchMode=yes", *argv[1:]], capture_output=True)
    assert (completed.returncode == 0) == is_let_in, "the job's own configuration, for `attach` and `ssh`"


@pytest.mark.parametrize("option", ["IdentityFile {path}\nIdentitiesOnly yes", "CertificateFile {path}-cert.pub"])
def test_certificate_of_an_agents_key_is_offered_as_openssh_offers_it(
    option: str, server: Any, shared_bed: Testbed, agent: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    authority, path = server.bed.new_key("authority"), server.bed.folder / "signed"
    shutil.copy(shared_bed.folder / "right.pub", f"{path}.pub")
    subprocess.run(["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", "root", f"{path}.pub"], check=True)
    server.configure(f"TrustedUserCAKeys {authority}.pub\n")
    known_hosts = server.bed.known_hosts(home / ".ssh/mine")
    write_user_config(server.bed, home, f'UserKnownHostsFile "{known_hosts}"\n{option.format(path=path)}')
    openssh = ["ssh", "-F", str(home / ".ssh/config"), "-o", "BatchMode=yes", "gpu", "true"]
    assert subprocess.run(openssh).returncode == 0, "what OpenSSH's client does"
    assert can_connect(Host(host="gpu"))


def test_agent_that_answers_nothing_has_no_keys(
    shared_bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forwarded from a computer that sleeps: the socket takes connections."""
    monkeypatch.setattr(ssh_connection, "AGENT_SECONDS", 0.1)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "agent"))
        silent.listen()
        assert "there is no key to log in with" in refusal_line(host(shared_bed, key=None))


# --- OpenSSH on a terminal ----------------------------------------------------------------------------------------


def test_write_ssh_config_gives_openssh_the_same_route(shared_bed: Testbed, home: Path) -> None:
    gate = shared_bed.machines[2]
    shared_bed.known_hosts(home / ".ssh/known_hosts")
    machines = hosts(shared_bed, jump=f"root@{gate.address}:{gate.port}").machines
    config = home / "run folder" / "ssh_config"
    write_ssh_config([resolve_route(host) for host in machines], config)
    before = gate.log.count("Accepted")

    def output(*argv: str) -> str:
        line = openssh_argv(config, 1, [*argv], tty=False)
        return subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120).stdout

    expected = f"{shared_bed.machines[1].home} a 'b\n"
    assert output("sh", "-c", 'echo "$HOME" "$1"', "x", "a 'b") == expected
    assert output("echo hello; echo 'two words' | wc -w").split() == ["hello", "2"], "one argument is a line for sh"
    assert gate.log.count("Accepted") - before == 2
    assert openssh_argv(config, 2) == ["ssh", "-F", str(config), "-t", "machine-2"]


def test_run_sweeps_command_folders_older_than_a_day(shared_bed: Testbed) -> None:
    folder = shared_bed.machines[0].home / ".imgnet/commands"
    for name in ("old", "new"):
        (folder / name).mkdir(parents=True)
        (folder / name / "code").write_text("0\n")
    os.utime(folder / "old", (0, 0))
    with SSHConnector(host(shared_bed)) as connector:
        connector.run(["true"])
        wait_for(lambda: not (folder / "old").exists())
    (folder / "new" / "code").unlink()
    (folder / "new").rmdir()


def test_run_script_whose_input_does_not_fit_on_the_disk_says_so(tmp_path: Path) -> None:
    full_disk = b'head() { command head "$@" >/dev/full; }\n'
    script = sh.run_script("a-task", str(tmp_path), ["touch", f"{tmp_path}/ran"], input_bytes=2)
    ran = subprocess.run(["sh", "-c", full_disk + script], input=b"in", capture_output=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (sh.EXIT_NO_FOLDER, b"") and b"No space left on device" in ran.stderr
    assert not [*(tmp_path / "commands").iterdir()] and not (tmp_path / "ran").exists()


def test_ssh_configuration_that_hangs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ssh_config, "SSH_CONFIG_SECONDS", 0.1)
    with pytest.raises(ClusterError, match=r"^ssh has not read its configuration for gpu in 0 s; .*try: ssh -G gpu$"):
        resolve_route(Host(host="gpu"))
