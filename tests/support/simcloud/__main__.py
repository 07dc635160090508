"""The simulated cloud for a person: EC2 on this computer, with machines that can be logged in to.

    python tests/support/simcloud [--port 5555] [--folder DIR] [--boot-seconds 2]

Serves until Ctrl-C, and prints the variables to export, as `make simcloud` does.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import threading
import urllib.error
import urllib.request
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


def serve(port: int, folder: Path, boot_seconds: float) -> None:
    """Serve until SIGINT or SIGTERM, then end all machines."""
    from support.simcloud import http_server
    from support.simcloud.cloud import SimulatedAws
    from support.simcloud.machines import SimulatedMachines, new_login

    is_over = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: is_over.set())
    sim = SimulatedAws(new_login(), boot_seconds=boot_seconds)
    machines = SimulatedMachines(sim, folder)
    try:
        server, url = http_server.serve(sim, port)
        threading.Thread(target=sim.run, daemon=True).start()
        machines.env["AWS_ENDPOINT_URL"] = url  # for the commands on the machines, whose keys are in their metadata
        print("\n".join(f"export {name}={value}" for name, value in environment(url).items()))
        print(f"\n# The machines' disks: {machines.folder}/<instance id>/home. Ctrl-C ends all machines.", flush=True)
        is_over.wait()
        server.shutdown()
    finally:
        machines.close()


def main() -> None:
    parser = argparse.ArgumentParser("simcloud", description="A simulated EC2 on this computer.")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--folder", type=Path, help="folder of the machines' disks; default: a temporary folder")
    parser.add_argument("--boot-seconds", type=float, default=2.0, help="seconds from pending to running")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simcloud-", ignore_cleanup_errors=True) as folder:
        serve(options.port, options.folder or Path(folder), options.boot_seconds)


if __name__ == "__main__":
    main()
