"""All tests in two processes side by side: `python tests/side_by_side.py [WORDS OF PYTEST]`. Exit code: the worse one.

One half is `tests/cluster`, which waits as long as it works, and `tests/simcloud`; the other is all else. The first
prints as it goes, the second when it is done.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
FIRST = (TESTS / "cluster", TESTS / "simcloud")


def rest() -> list[Path]:
    """Return the folders and files of tests that are not the first half."""
    found = [*TESTS.glob("test_*.py"), *{path.parent for path in TESTS.glob("*/test_*.py")}]
    return sorted({*found} - {*FIRST})


def main(words: list[str]) -> int:
    """Run both. Returns the worse exit code."""
    command = [sys.executable, "-m", "pytest", *words]
    with tempfile.TemporaryFile() as said:
        other = subprocess.Popen([*command, *map(str, rest())], stdout=said, stderr=said, cwd=TESTS.parent)
        try:
            first = subprocess.run([*command, *map(str, FIRST)], cwd=TESTS.parent).returncode
            second = other.wait()
        finally:
            other.kill()
            other.wait()
        said.seek(0)
        sys.stdout.buffer.write(said.read())
    return max(first, second)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
