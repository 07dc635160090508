"""Programs of others that some tests compare with: in this environment, or in the one that `make peers` makes."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS_FOLDER = REPOSITORY / "benchmarks" / ".venv"
SCRIPTS = REPOSITORY / "tests" / "peers" / "scripts"
FIND_MODULES = "import sys, importlib.util as util; sys.exit(not all(map(util.find_spec, sys.argv[1:])))"


@functools.cache
def peer_python(*modules: str) -> Path:
    for python in (Path(sys.executable), PEERS_FOLDER / "bin" / "python"):
        if python.exists() and subprocess.run([str(python), "-c", FIND_MODULES, *modules]).returncode == 0:
            return python
    pytest.skip(f"{', '.join(modules)} is not installed; make peers installs what is compared with")


def run_script(name: str, *arguments: object, module: str) -> Any:
    """Run a script of tests/peers/scripts where its module is installed, and return the JSON that it prints."""
    command = [peer_python("torch", module), SCRIPTS / name, *arguments]
    completed = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(completed.stdout or "null")
