"""The simulated cloud for a person: EC2 on this computer, with machines that can be logged in to.

    python -m support.simcloud [--port 5555] [--folder DIR] [--boot-seconds 2]   serve until Ctrl-C; print the exports
    python -m support.simcloud ls | bill                                         list instances; show what they cost
    python -m support.simcloud interrupt i-... [--notice 20]                     interrupt a spot instance

`make simcloud` is the first. All of them work without PYTHONPATH too: `python tests/support/simcloud ls`.
"""

import argparse
import contextlib
import json
import signal
import socket
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also for `python tests/support/simcloud`

DEFAULT_PORT = 5555


def environment(url: str) -> dict[str, str]:
    """Return the environment in which a command takes the cloud at this address for AWS."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "simulated",
        "AWS_SECRET_ACCESS_KEY": "simulated",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def post_command(url: str, command: str, **arguments: Any) -> Any:
    """Give a running cloud a control command and return the answer. Raises `RuntimeError` when the cloud refuses."""
    request = urllib.request.Request(f"{url}/_sim/{command}", json.dumps(arguments).encode(), method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError):
            message = json.loads(message)["error"]
        raise RuntimeError(f"{command}: {message}") from None


def machine_commands(machines: Any) -> dict[str, Callable[..., Any]]:
    """Return the control commands of a cloud with machines, beside those of `support.simcloud.control`."""

    def reset(front: Any) -> None:
        front.reset()
        machines.reset()

    return {
        "break_gpu": lambda front, id, how: machines.break_gpu(id, how),
        "machines": lambda front, **settings: machines.configure(**settings),
        "reset": reset,
    }


def check_port_is_free(port: int) -> None:
    """Raise `RuntimeError` when another process listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RuntimeError(f"the port is taken; for a second cloud: make simcloud PORT={port + 1}") from error


def serve(port: int, folder: Path, boot_seconds: float) -> None:
    """Serve until SIGINT or SIGTERM, then end all machines."""
    from support.simcloud import http_server
    from support.simcloud.cloud import SimulatedAws
    from support.simcloud.control import CONTROL_COMMANDS
    from support.simcloud.machines import SimulatedMachines

    check_port_is_free(port)
    is_over = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: is_over.set())
    sim = SimulatedAws(boot_seconds=boot_seconds)
    machines = SimulatedMachines(sim, folder)
    CONTROL_COMMANDS.update(machine_commands(machines))
    try:
        server, url = http_server.serve(port, sim)
        machines.env["AWS_ENDPOINT_URL"] = url  # for the commands on the machines, whose keys are in their metadata
        print("\n".join(f"export {name}={value}" for name, value in environment(url).items()))
        print(f"\n# The machines' disks: {machines.folder}/<instance id>/home. Ctrl-C ends all machines.")
        option = f" --port {url.rpartition(':')[2]}" if port != DEFAULT_PORT else ""
        print("# In another terminal:")
        for command in ("ls", "bill", "interrupt i-... --notice 20"):
            print(f"#   python tests/support/simcloud {command}{option}", flush=True)
        is_over.wait()
        server.shutdown()
    finally:
        machines.close()


def print_instances(url: str) -> None:
    """Print a line for each instance."""
    for instance in post_command(url, "instances"):
        columns = [instance[key] for key in ("id", "state", "type", "market", "zone", "private")]
        print(*columns, instance["tags"].get("Name", ""), sep="\t")


def main() -> None:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser("simcloud", description="A simulated EC2 on this computer.")
    parser.add_argument("command", nargs="?", choices=["serve", "ls", "bill", "interrupt"], default="serve")
    parser.add_argument("id", nargs="?", help="the instance to interrupt")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--folder", type=Path, help="folder of the machines' disks; default: a temporary folder")
    parser.add_argument("--boot-seconds", type=float, default=2.0, help="seconds from pending to running")
    parser.add_argument(
        "--notice", type=float, default=120.0, help="seconds from the notice to the end of the instance"
    )
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}"
    try:
        if options.command == "serve" and options.folder:
            serve(options.port, options.folder, options.boot_seconds)
        elif options.command == "serve":
            with tempfile.TemporaryDirectory(prefix="simcloud-", ignore_cleanup_errors=True) as folder:
                serve(options.port, Path(folder), options.boot_seconds)
        elif options.command == "ls":
            print_instances(url)
        elif options.command == "bill":
            print(json.dumps(post_command(url, "bill"), indent=1))
        elif not options.id:
            parser.error("which instance? `python tests/support/simcloud ls` lists them")
        else:
            post_command(url, "interrupt", id=options.id, notice=options.notice)
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: {url}: {error}")


if __name__ == "__main__":
    main()
