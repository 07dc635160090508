"""Machines that only wait: ssh servers of one process, which answer our commands after fixed delays and run nothing.

    python benchmarks/launch/waiting_machines.py FOLDER COUNT PORT

A real sshd, its login and its shells cost about 0.2 s of processor time per launch. With many of them on one computer
that is measured, and not our own share. These know the commands of `cluster.machines` by their text.
"""

import json
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import paramiko

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.launch.stub import StubDelays
from cluster.connectors.ssh_scripts import RUN_SCRIPT
from cluster.machines.checks import MachineFacts, SeenMarkers, SharedFolder, WorkFolder
from train.tools.records import encode

LOGIN_SECONDS = 1.5  # of a login on EC2
ANSWER_SECONDS = 0.05  # of any command, a round trip over a long way
DELAYS = StubDelays()
FACTS = MachineFacts(
    time=0.0,
    tmux="3",
    shm_bytes=1_000_000_000,
    gpus=(),
    nvidia="missing",
    work=WorkFolder(path="/work", writable=True, free_gb=100.0),
    shared=SharedFolder(path="/shared", link=True, type="ext4", options="rw", point="/", source="none"),
)


def address(number: int) -> str:
    """Return the address of a machine; numbers begin at 0."""
    return f"127.2.{number // 200}.{number % 200 + 1}"


def make_keys(folder: Path) -> None:
    """Make the login key "key" and the machines' common host key "host_key" in a folder."""
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)], check=True)


def write_hosts_file(folder: Path, count: int, port: int) -> Path:
    """Write a hosts file of the first `count` machines."""
    host_key = (folder / "host_key.pub").read_text().strip()
    lines = ['shared = "/shared"', 'user = "user"', f"port = {port}", f'key = "{folder / "key"}"']
    for number in range(count):
        lines += ["[[machines]]", f'host = "{address(number)}"', f'host_key = "{host_key}"']
    path = folder / f"hosts-{count}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


class SharedJob:
    """What the machines of a job have in common: the ID of the launch, when each agent started, the stop request."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.launch = ""
        self.starts: dict[str, float] = {}  # when the trainer of each machine is ready, by machine name
        self.is_stopped = False
        self.commands: Counter[int] = Counter()
        self.logins: Counter[int] = Counter()
        self.world_size = 1

    def status(self, name: str) -> str:
        """Return the content of a machine's status file."""
        ready = self.starts[name]
        state = "training" if len(self.starts) >= self.world_size and time.time() > ready else "warming"
        step = max(0, int(time.time() - ready))
        end = ', "reason": "stopped by the user", "ended": true' if self.is_stopped else ""
        state = "stopped" if self.is_stopped else state
        return (
            f'{{"id": "{name}.1", "launch": "{self.launch}", "pid": 1, "attempt": 1, "phase": "running", '
            f'"state": "{state}", "step": {step}, "steps": 100000{end}}}'
        )


class Machine(paramiko.ServerInterface):
    """One connection to one machine."""

    def __init__(self, number: int, job: SharedJob) -> None:
        self.number, self.job = number, job

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        """Let everybody in, as late as sshd on EC2."""
        time.sleep(LOGIN_SECONDS)
        self.job.logins[self.number] += 1
        return int(paramiko.common.AUTH_SUCCESSFUL)

    def get_allowed_auths(self, username: str) -> str:
        """Keys only."""
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        """Open every channel."""
        return int(paramiko.common.OPEN_SUCCEEDED)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        """Answer a command in a thread of its own."""
        threading.Thread(target=self.answer, args=(channel, command), daemon=True).start()
        return True

    def answer(self, channel: paramiko.Channel, command: bytes) -> None:
        """Read the script from stdin and answer it."""
        size = int(re.findall(rb"head -c (\d+)", command)[0])
        script = receive(channel, size).decode()
        time.sleep(ANSWER_SECONDS)
        variables = dict(re.findall(r"\b([a-z])=('[^']*'|\S*)", script.partition("\n")[2].partition("\n")[0]))
        if RUN_SCRIPT in script:
            argv = shlex.split(script.removesuffix(RUN_SCRIPT).partition("\nset -- ")[2])
            content = receive(channel, int(variables["n"]))
            stdout = self.run(argv, content).encode()
            code = int("agent.lock" in argv[-1] and self.job.is_stopped)  # whether an agent runs
            channel.sendall(f"\n{variables['i']} {code} {len(stdout)} 0\n".encode() + stdout)
            channel.recv(1)
        elif "status/" in script:
            channel.sendall(self.new_bytes(variables["m"]).encode())
        elif "/stop" in script:
            self.job.is_stopped = True
        channel.send_exit_status(0)
        channel.close()

    def run(self, argv: list[str], content: bytes) -> str:
        """Return what a command prints, after its delay. Knows the commands by their text."""
        text, job = " ".join(argv), self.job
        with job.lock:
            job.commands[self.number] += 1
        if "cluster.machines.python_env" in text:
            time.sleep(DELAYS.environment + DELAYS.probe)
            environment = {"python": "/python", "made": False, "torch": "2", "why": "", "seconds": DELAYS.environment}
            facts = json.dumps(encode(replace(FACTS, time=time.time())))
            return f"{json.dumps(environment)}\n{facts}\nexit code 0\n"
        if "--expect" in text:
            words = shlex.split(argv[-1].removeprefix("{ "))
            names = words[words.index("--expect") + 1].split(",")
            seen = json.dumps(encode(SeenMarkers(seen=dict.fromkeys(names, True))))
            return f"{seen}\nexit code 0\n"
        if "recipe.json" in argv:
            sizes = [int(size) for size in argv[argv.index("job.json") + 1 :: 2]]
            job.launch = content[-sizes[-1] :].decode().strip()
            job.world_size = json.loads(content[: sizes[0]])["machines"]
            job.starts, job.is_stopped = {}, False
        elif "cluster.agent" in text:
            name = re.findall(r"(\S+) --address", text)[-1]
            with job.lock:
                job.starts[name] = time.time() + DELAYS.start
        elif '"$HOME"' in text:
            return "/home/user\n0\n"  # the home folder, and the size of the set-up's log
        return ""

    def new_bytes(self, delimiter: str) -> str:
        """Return the answer to the question for the new bytes of the job's files: its status files."""
        job = self.job
        with job.lock:
            files = {f"status/{name}.json": job.status(name) for name in job.starts}
        parts = [f"{delimiter}\n{path}\n{content}" for path, content in files.items()]
        return "".join([*parts, f"{delimiter}\nend\n"])


def receive(channel: paramiko.Channel, size: int) -> bytes:
    """Return exactly `size` bytes of a channel. Raises `EOFError`."""
    data = bytearray()
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def listen(number: int, port: int, host_key: paramiko.PKey, job: SharedJob) -> None:
    """Serve one machine for ever."""
    with socket.create_server((address(number), port), backlog=16) as server:
        while True:
            connection, _ = server.accept()
            transport = paramiko.Transport(connection)
            transport.add_server_key(host_key)
            transport.start_server(event=threading.Event(), server=Machine(number, job))


def main() -> None:
    """Serve the machines until stdin is closed. A line on stdin is answered by the counts so far, and resets them."""
    folder, count, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    host_key = paramiko.Ed25519Key.from_private_key_file(str(folder / "host_key"))
    job = SharedJob()
    for number in range(count):
        threading.Thread(target=listen, args=(number, port, host_key, job), daemon=True).start()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps([dict(job.logins), dict(job.commands)]), flush=True)
        job.logins.clear()
        job.commands.clear()


if __name__ == "__main__":
    main()
