"""Looks for chance in tests: `make flaky TESTS=...` repeats them beside busy loops and prints what failed.

Each test runs `REPEATS` times with the priority of the loops, and as often with the lowest, so that it is starved. A
wait that has used a large share of its limit is a finding too, even when nothing fails (LARGE_SHARE).
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from support import waiting

from train.tools.process import die_with_parent

REPEATS = 20
LOOPS_PER_PROCESSOR = 3
STARVED = 19  # niceness
LARGE_SHARE = 0.3


@pytest.fixture
def repeat(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test several times. TESTS cannot name single parameters, because this adds one."""
    metafunc.fixturenames.append("repeat")
    metafunc.parametrize("repeat", range(REPEATS), indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    waiting.largest_waits.test = item.nodeid.rpartition("[")[0]
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for test, share in sorted(waiting.largest_waits.shares.items(), key=lambda pair: -pair[1]):
        finding = "  <- find out why" if share > LARGE_SHARE else ""
        terminalreporter.write_line(f"{share:6.1%} of a limit: {test}{finding}")


def main(tests: Sequence[str]) -> int:
    """Run the tests beside busy loops, twice. Returns the exit code of the worse run."""
    loop = [sys.executable, "-c", "while True: pass"]
    count = LOOPS_PER_PROCESSOR * len(os.sched_getaffinity(0))
    loops = [subprocess.Popen(loop, preexec_fn=die_with_parent) for _ in range(count)]
    codes = []
    try:
        for niceness in (0, STARVED):
            print(f"{REPEATS} times beside {count} busy loops, at niceness {niceness}", flush=True)
            pytest_command = [sys.executable, "-m", "pytest", "-p", "support.flaky", "--tb=short", *tests]
            codes.append(subprocess.run(["nice", "-n", str(niceness), *pytest_command]).returncode)
    finally:
        for process in loops:
            process.kill()
            process.wait()
    return max(codes)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("name the tests: make flaky TESTS=tests/cluster/agent/test_agent.py")
    sys.exit(main(sys.argv[1:]))
