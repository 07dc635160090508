"""Reading hosts.toml: the resulting hosts, and the one-line error for each kind of mistake."""

import re
from pathlib import Path
from typing import Any

import pytest

from cluster.connectors.hosts_file import Host, Hosts, read_hosts
from cluster.errors import EXIT_USAGE, BadInput

COMPLETE_FILE = """\
shared = "/mnt/shared/imgnet"
user = "ubuntu"
port = 2222
key = "~/.ssh/id_ed25519"
jump = "me@gate.example.com:22"
python = "python3.11"
folder = "~/work"
machines = [
    {host = "gpu1", address = "10.0.0.11", host_key = "ssh-ed25519 AAAAC3"},
    {host = "gpu2", user = "other", port = 22, folder = "/scratch/imgnet"},
    "gpu3:24", {host = "[fd00::1]:23"}, "fd00::2", "[fd00::3]",
]
"""


def parse_text(tmp_path: Path, text: str) -> Hosts:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    return read_hosts(path)


def test_read_hosts_keys_of_a_machine_override_top_level_keys(tmp_path: Path) -> None:
    common: dict[str, Any] = {"port": 2222, "user": "ubuntu", "folder": "~/work", "key": "~/.ssh/id_ed25519"}
    common |= {"jump": "me@gate.example.com:22", "python": "python3.11"}
    own: list[dict[str, Any]] = [
        {"host": "gpu1", "address": "10.0.0.11", "host_key": "ssh-ed25519 AAAAC3"},
        {"host": "gpu2", "user": "other", "port": 22, "folder": "/scratch/imgnet"},
        {"host": "gpu3", "port": 24},
        {"host": "fd00::1", "port": 23},
        {"host": "fd00::2"},
        {"host": "fd00::3"},
    ]
    machines = tuple(Host(**{**common, **values}) for values in own)
    assert parse_text(tmp_path, COMPLETE_FILE) == Hosts("/mnt/shared/imgnet", machines)


TWO_MACHINES = 'machines = ["a", "b"]\n'


@pytest.mark.parametrize(
    "text, message",
    {
        "": "machines: lists no machine; write machines = ",
        "machines = []": "machines: lists no machine",
        TWO_MACHINES: 'shared: is missing; write the folder that all machines mount: shared = "/mnt',
        'shared = "relative"\n' + TWO_MACHINES: "shared: is 'relative'; write an absolute path",
        'usr = "me"\n'
        + TWO_MACHINES: "usr: is not a known key at the top level; known are shared, machines, port, user",
        'shared = "/a"\n[[machines]]\nhots = "a"': (
            "machines[0].hots: is not a known key in a [[machines]] table; known are host, address"
        ),
        'shared = "/a"\n[[machines]]\nuser = "a"': "machines[0].host: is missing; write host = ",
        'shared = "/a"\nmachines = ["a", 3]': "machines[1]: is 3; write a name",
        'shared = "/a"\nmachines = ["-oProxyCommand=x"]': "machines[0].host: is '-oProxyCommand=x'; write",
        'shared = "/a"\nmachines = ["a", "b", "A"]': "machines[2].host: A is already machines[0]; remove one",
        'port = "22"\nmachines = ["a"]': "port: is '22'; write a number from 1 to 65535",
        "port = 65536\nmachines = ['a']": "port: is 65536; write a number",
        "user = 3\nmachines = ['a']": 'user: is 3; write a name, such as user = "ubuntu"',
        "folder = 'imgnet'\nmachines = ['a']": "folder: is 'imgnet'; write a path that begins with / or ~/",
        "[[machines]]\nhost = 'a'\nhost_key = 'AAAA'": "machines[0].host_key: is 'AAAA'; write a key type and a key",
        'machines = ["a:70000"]': "machines[0].port: is 70000; write a number from 1 to 65535",
        "[[machines]]\nhost = 'a:23'\nport = 22": "machines[0].port: is given twice, in host = 'a:23' too",
        "machines = [": "Invalid value (at end of document)",
    }.items(),
)
def test_read_hosts_invalid_file_raises_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_text(tmp_path, text)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}/hosts.toml: {message}")
    assert "\n" not in line and caught.value.exit_code == EXIT_USAGE


def test_read_hosts_unreadable_file_raises_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.toml: no such file; .* needs this line: machines =") as caught:
        read_hosts(tmp_path / "none.toml")
    machines, shared = re.findall(r": (\w+ = [^;,]*)", str(caught.value))
    assert parse_text(tmp_path, machines).machines[0].host == "gpu1", "what the error says works as it stands"
    assert parse_text(tmp_path, f"{machines}\n{shared}").shared == "/mnt/shared/imgnet"
    with pytest.raises(BadInput, match=f"^{tmp_path}: Is a directory$"):
        read_hosts(tmp_path)
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(BadInput, match=f"^{tmp_path}/a: 'utf-8' codec can't decode"):
        read_hosts(tmp_path / "a")
