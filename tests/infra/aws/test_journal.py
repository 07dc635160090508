"""What was about to be done is on the disk before it is done."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infra.aws.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "job" / "cloud.jsonl")


def test_lines_are_kept_in_order_and_found_by_kind(journal: Journal) -> None:
    assert journal.lines() == []
    journal.write("ask", number=1, said="grün\u2028\n\x85 'x'")
    journal.write("granted", number=1)
    journal.write("ask", number=2)
    assert [one["what"] for one in Journal(journal.path).lines()] == ["ask", "granted", "ask"]
    assert [one["number"] for one in journal.lines("ask")] == [1, 2]
    assert journal.lines("ask")[0]["said"] == "grün\u2028\n\x85 'x'" and journal.lines()[0]["time"] > 0


def test_nobody_else_may_read_it_for_it_holds_a_host_key(journal: Journal) -> None:
    before = os.umask(0)
    try:
        journal.write("ask")
    finally:
        os.umask(before)
    assert journal.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("torn", ['{"what": "gran', '{"time": 1, "what": "granted"', '"gran', "7", "\xff\xfe"])
def test_a_line_that_was_torn_harms_no_other(journal: Journal, torn: str) -> None:
    journal.write("ask", number=1)
    with journal.path.open("ab") as file:
        file.write(torn.encode("latin-1"))
    assert [one["what"] for one in journal.lines()] == ["ask"]
    journal.write("refused", number=1)
    assert [one["what"] for one in journal.lines()] == ["ask", "refused"]


def test_a_line_is_synced_before_the_call_returns(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda number: synced.append(str(Path(f"/proc/self/fd/{number}").readlink())))
    journal.write("ask")
    assert synced == [str(journal.path), str(journal.path.parent)]


def test_a_disk_that_is_full_is_an_error_and_the_journal_good_for_more(journal: Journal) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from infra.aws.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
one = Journal(Path(sys.argv[1]))
one.write("ask", number=1)
try:
    one.write("ask", number=2, user_data="x" * 9000)
except OSError:
    sys.exit(7)
"""
    root = Path(__file__).resolve().parents[3]
    ran = subprocess.run([sys.executable, "-c", script, str(journal.path)], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 7, ran.stderr
    assert [one["what"] for one in journal.lines()] == ["ask"]
    journal.write("refused")
    assert [one["what"] for one in journal.lines()] == ["ask", "refused"]


def test_long_lines_of_several_writers_do_not_mix(journal: Journal) -> None:
    def write(name: str) -> None:
        own = Journal(journal.path)
        for number in range(20):
            own.write(name, number=number, text=name * 30_000)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = sorted((one["what"], one["number"]) for one in journal.lines())
    assert found == [(name, number) for name in "abcd" for number in range(20)]
