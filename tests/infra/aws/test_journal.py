"""Journal: intents are on disk before the AWS call."""

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


def test_lines_are_in_order_and_selected_by_kind(journal: Journal) -> None:
    assert journal.lines() == []
    journal.write("ask", number=1, said="grün\u2028\n\x85 'x'")
    journal.write("granted", number=1)
    journal.write("ask", number=2)
    assert [line["what"] for line in Journal(journal.path).lines()] == ["ask", "granted", "ask"]
    assert [line["number"] for line in journal.lines("ask")] == [1, 2]
    assert journal.lines("ask")[0]["said"] == "grün\u2028\n\x85 'x'" and journal.lines()[0]["time"] > 0


def test_write_creates_a_file_only_the_owner_may_read(journal: Journal) -> None:
    before = os.umask(0)
    try:
        journal.write("ask")
    finally:
        os.umask(before)
    assert journal.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("torn", ['{"what": "gran', '{"time": 1, "what": "granted"', '"gran', "7", "\xff\xfe"])
def test_torn_line_is_ignored_and_the_next_one_is_complete(journal: Journal, torn: str) -> None:
    journal.write("ask", number=1)
    with journal.path.open("ab") as file:
        file.write(torn.encode("latin-1"))
    assert [line["what"] for line in journal.lines()] == ["ask"]
    journal.write("refused", number=1)
    assert [line["what"] for line in journal.lines()] == ["ask", "refused"]


def test_write_syncs_file_and_folder_before_it_returns(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda number: synced.append(str(Path(f"/proc/self/fd/{number}").readlink())))
    journal.write("ask")
    assert synced == [str(journal.path), str(journal.path.parent)]


def test_write_on_a_full_disk_raises_and_later_lines_are_kept(journal: Journal) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from infra.aws.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
journal = Journal(Path(sys.argv[1]))
journal.write("ask", number=1)
try:
    journal.write("ask", number=2, user_data="x" * 9000)
except OSError:
    sys.exit(7)
"""
    root = Path(__file__).resolve().parents[3]
    completed = subprocess.run(
        [sys.executable, "-c", script, str(journal.path)], cwd=root, capture_output=True, text=True
    )
    assert completed.returncode == 7, completed.stderr
    assert [line["what"] for line in journal.lines()] == ["ask"]
    journal.write("refused")
    assert [line["what"] for line in journal.lines()] == ["ask", "refused"]


def test_write_from_several_threads_does_not_mix_lines(journal: Journal) -> None:
    def write(name: str) -> None:
        own_journal = Journal(journal.path)
        for number in range(20):
            own_journal.write(name, number=number, text=name * 30_000)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds_and_numbers = sorted((line["what"], line["number"]) for line in journal.lines())
    assert kinds_and_numbers == [(name, number) for name in "abcd" for number in range(20)]
