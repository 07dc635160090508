"""Keys of ssh-agent are offered to a real sshd as OpenSSH's own client offers them."""

import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ssh_machines import Testbed
from support.waiting import wait_for

from cluster.connectors.hosts_file import Host
from cluster.connectors.ssh import SSHConnector, SSHRefused
from cluster.connectors.ssh_config import openssh_argv, resolve_route, write_ssh_config


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """A machine that accepts the key `right` and not the key `wrong`."""
    with Testbed(tmp_path_factory.mktemp("beds") / "bed", 1) as bed:
        bed.authorize(bed.new_key("right"))
        bed.new_key("wrong")
        yield bed


@pytest.fixture
def agent(tmp_path: Path, bed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An ssh-agent that has both keys, the wrong one first. Returns its socket."""
    path = tmp_path / "agent.sock"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        wait_for(path.exists)
        for name in ("wrong", "right"):
            subprocess.run(["ssh-add", "-q", str(bed.folder / name)], check=True, capture_output=True)
        yield path
    finally:
        process.kill()
        process.wait()


def serve_agent_with_fido_key(path: Path, real: Path) -> None:
    """Serve an agent that has a FIDO key first, which it does not sign with, and then the keys of a real agent."""

    def string(data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + data

    def read(stream: socket.socket) -> bytes:
        head = stream.recv(4, socket.MSG_WAITALL)
        return stream.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL) if len(head) == 4 else b""

    fido_key = string(b"sk-ssh-ed25519@openssh.com") + string(b"\1" * 32) + string(b"ssh:")

    def serve(stream: socket.socket) -> None:
        while message := read(stream):
            if message[0] == 13 and fido_key in message:  # a request to sign with it
                stream.sendall(string(b"\5"))
                continue
            with socket.socket(socket.AF_UNIX) as real_stream:
                real_stream.connect(str(real))
                real_stream.sendall(string(message))
                answer = read(real_stream)
            if message[0] == 11:  # the list of keys
                count = struct.unpack(">I", answer[1:5])[0] + 1
                answer = b"\x0c" + struct.pack(">I", count) + string(fido_key) + string(b"me@yubikey") + answer[5:]
            stream.sendall(string(answer))

    def accept(listener: socket.socket) -> None:
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    threading.Thread(target=accept, args=(listener,), daemon=True).start()


@pytest.mark.parametrize("config, is_let_in", [
    ("", True),
    ("IdentityAgent SSH_AUTH_SOCK", True),
    ("IdentityAgent $OTHER_AGENT", True),
    ('IdentityAgent "{folder}/fido.sock"', True),
    ("IdentityFile {keys}/right.pub\nIdentitiesOnly yes", True),
    ("IdentityFile {folder}/only-in-agent\nIdentitiesOnly yes", True),
    ("IdentityFile {folder}/locked", True),
    ("IdentityFile {keys}/wrong.pub\nIdentitiesOnly yes", False),
    ("IdentityAgent none", False),
    ("IdentityAgent /nonexistent/agent.sock", False),
])  # fmt: skip
def test_keys_of_an_agent_are_offered_as_openssh_offers_them(
    config: str, is_let_in: bool, bed: Testbed, agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_agent_with_fido_key(tmp_path / "fido.sock", agent)
    monkeypatch.setenv("OTHER_AGENT", str(tmp_path / "fido.sock"))
    shutil.copy(bed.folder / "right", tmp_path / "locked")
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(tmp_path / "locked")], check=True)
    (tmp_path / "only-in-agent.pub").write_bytes((bed.folder / "right.pub").read_bytes())
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    known_hosts = bed.known_hosts(home / ".ssh/mine")
    server = bed.machines[0]
    (home / ".ssh/config").write_text(
        f"Host gpu\nHostName {server.address}\nPort {server.port}\nUser root\nUserKnownHostsFile {known_hosts}\n"
        + config.format(folder=tmp_path, keys=bed.folder)
    )
    openssh = ["ssh", "-F", str(home / ".ssh/config"), "-o", "BatchMode=yes", "gpu", "true"]
    assert (subprocess.run(openssh, capture_output=True).returncode == 0) == is_let_in, "what OpenSSH's client does"
    with SSHConnector(Host(host="gpu"), "machine 0 (gpu)", reconnect_seconds=5) as connector:
        if is_let_in:
            assert connector.run(["true"]).code == 0
        else:
            with pytest.raises(SSHRefused):
                connector.run(["true"])
    write_ssh_config([resolve_route(Host(host="gpu"))], tmp_path / "job/ssh_config")
    argv = openssh_argv(tmp_path / "job/ssh_config", 0, ["true"], tty=False)
    completed = subprocess.run([*argv[:1], "-o", "BatchMode=yes", *argv[1:]], capture_output=True)
    assert (completed.returncode == 0) == is_let_in, "the job's own configuration, for `attach` and `ssh`"
