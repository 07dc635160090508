"""The simulated cloud for a person: EC2 on this computer, with machines that can be logged in to.

    python -m simcloud [--port 5555] [--folder DIR] [--boot-seconds 2]      serve until Ctrl-C; prints what to export
    python -m simcloud ls | bill                                            what runs, what it has cost
    python -m simcloud interrupt i-... [--notice 20]                        take a spot machine back

`make simcloud` is the first; the others also without PYTHONPATH: `python tests/support/simcloud ls`.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also for `python tests/support/simcloud`

PORT = 5555


def environment(url: str) -> dict[str, str]:
    """All that a command needs to take this cloud for AWS."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "simulated",
        "AWS_SECRET_ACCESS_KEY": "simulated",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def ask(url: str, what: str, **words: Any) -> Any:
    """Post to a running cloud's control and return what it answers. Raises `RuntimeError` when it refuses."""
    request = urllib.request.Request(f"{url}/_sim/{what}", json.dumps(words).encode(), method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError):
            said = json.loads(said)["error"]
        raise RuntimeError(f"{what}: {said}") from None


def orders(machines: Any) -> dict[str, Callable[[Any, dict[str, Any]], Any]]:
    """What can be posted to a cloud with machines, beside the orders of `simcloud.control`."""

    def forget_calls(front: Any, _: dict[str, Any]) -> None:
        """Count the calls from 1 again."""
        front.calls = []

    def reset(front: Any, _: dict[str, Any]) -> None:
        front.reset()
        machines.reset()

    return {"forget_calls": forget_calls, "machines": lambda _, words: machines.set(**words), "reset": reset}


def serve(port: int, folder: Path, boot_seconds: float) -> None:
    """Serve until SIGINT or SIGTERM, then end all machines."""
    from support.simcloud.cloud import Sim
    from support.simcloud.control import ORDERS
    from support.simcloud.http_server import serve as listen
    from support.simcloud.machines import Machines

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    sim = Sim(boot_seconds=boot_seconds)
    machines = Machines(sim, folder)
    ORDERS.update(orders(machines))
    try:
        server, url = listen(port, sim)
        machines.env["AWS_ENDPOINT_URL"] = url  # what a machine takes for AWS; its keys are the metadata service's
        print("\n".join(f"export {name}={text}" for name, text in environment(url).items()))
        print(f"\n# Their disks: {machines.folder}/<instance id>/home. Ctrl-C here ends them all. In another terminal:")
        more = f" --port {url.rpartition(':')[2]}" if port != PORT else ""
        print(f"#   python tests/support/simcloud ls{more}, bill{more}, interrupt i-... --notice 20{more}", flush=True)
        over.wait()
        server.shutdown()
    finally:
        machines.close()


def show(url: str) -> None:
    """Print a line for each instance."""
    for one in ask(url, "instances"):
        words = [one["id"], one["state"], one["type"], one["market"], one["zone"], one["private"]]
        print(*words, one["tags"].get("Name", ""), sep="\t")


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser("simcloud", description="A simulated EC2 on this computer.")
    parser.add_argument("what", nargs="?", choices=["serve", "ls", "bill", "interrupt"], default="serve")
    parser.add_argument("id", nargs="?", help="the instance to interrupt")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--folder", type=Path, help="where the machines' disks are; default: a temporary folder")
    parser.add_argument("--boot-seconds", type=float, default=2.0, help="from pending to running")
    parser.add_argument("--notice", type=float, default=120.0, help="seconds from a notice to the end")
    said = parser.parse_args()
    url = f"http://127.0.0.1:{said.port}"
    try:
        if said.what == "serve" and said.folder:
            serve(said.port, said.folder, said.boot_seconds)
        elif said.what == "serve":
            with tempfile.TemporaryDirectory(prefix="simcloud-", ignore_cleanup_errors=True) as folder:
                serve(said.port, Path(folder), said.boot_seconds)
        elif said.what == "ls":
            show(url)
        elif said.what == "bill":
            print(json.dumps(ask(url, "bill"), indent=1))
        elif not said.id:
            parser.error("which instance? `python -m simcloud ls` names them")
        else:
            ask(url, "interrupt", id=said.id, notice=said.notice)
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: {url}: {error}")


if __name__ == "__main__":
    main()
