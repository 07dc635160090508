"""The rules for what machines send: no answer, however made, leads out of the run folder or past a bound."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.connectors import untrusted
from cluster.connectors.untrusted import ArrivalFolder, BadAnswer

MARK = "0123456789abcdef"
MACHINES = ("0", "1")
# The text of a machine made of pieces that mean something to the parsers.
PIECES = [b"\n", b"\0", b" ", b"end\n", b"more\n", f"{MARK}\n".encode(), b"logs/a\n", b"../x\n", b"9" * 30]
NOISE = st.lists(st.binary(max_size=20) | st.sampled_from(PIECES), max_size=12).map(b"".join)


@pytest.mark.parametrize(("path", "is_mirrored"), [
    *((path, True) for path in (
        "status/0.json", "attempts/000001.json", "metrics/000001.jsonl", "logs/000001/rank-0.log", "logs/setup-0.log",
        "logs/val-000002.json", "events/events.out.tfevents.1700000000.ip-10-0-0-1.ec2.internal.77.0",
        "ids/000002-rank-3.jsonl",
    )),
    *((path, False) for path in (
        "logs/evil.py", "logs/__pycache__/evil.pyc", "events/evil.abi3.so", "status/0.py",  # Python could import them
        "metrics/000001.jsonl/x", "ids/000001-rank-0.jsonl/x", "logs/agent-0.jsonl/a/b",  # folders in place of files
        "logs/../../x", "logs/..", "status/../0.json", "../x", "/etc/passwd", "logs//x", "logs/./x", "logs/",
        "logs/a/b/c/d", "logs/-rf", "logs/.hid/x", "logs/a b", "logs/a\0b", "logs/é", f"logs/{'a' * 200}",
        "checkpoints/x", "status/2.json", "attempts/000001.json\n", "attempts/00000\u0661.json",
    )),
])  # fmt: skip
def test_paths_of_the_project_are_mirrored_and_others_are_not(path: str, is_mirrored: bool) -> None:
    assert untrusted.is_mirrored_path(path, MACHINES) is is_mirrored


@given(NOISE, st.dictionaries(st.sampled_from(["logs/a", "metrics/b"]), st.integers(0, 1 << 33)))
def test_parse_new_bytes_gives_mirrored_files_or_bad_answer(noise: bytes, known_sizes: dict[str, int]) -> None:
    with contextlib.suppress(BadAnswer):
        answer = untrusted.parse_new_bytes(noise, MARK, known_sizes, MACHINES)
        for path, content in answer.contents.items():
            assert untrusted.is_mirrored_path(path, MACHINES)
            assert known_sizes.get(path, 0) + len(content) <= untrusted.MAX_FILE_BYTES


def answer_of(*files: tuple[str, bytes]) -> bytes:
    return b"".join(f"{MARK}\n{path}\n".encode() + data for path, data in files) + f"{MARK}\nend\n".encode()


MOST_ATTEMPTS = {f"attempts/{number:06d}.json": untrusted.MAX_RECORD_BYTES for number in range(1, 1025)}
MOST_FILES = {f"logs/{number}": 0 for number in range(untrusted.MAX_FILE_COUNT)}


@pytest.mark.parametrize("known_sizes, stdout, rule", [
    ({}, answer_of(("logs/a", b"1"), ("logs/a", b"2")), "has logs/a twice"),
    ({}, answer_of(("logs/a", b"1")).removesuffix(f"{MARK}\nend\n".encode()), "ends in another form"),
    ({}, answer_of(("status/0.json", bytes(untrusted.MAX_RECORD_BYTES + 1))), "makes status/0.json 0.1 MB long"),
    ({}, answer_of(("attempts/000001.json", bytes(untrusted.MAX_RECORD_BYTES + 1))), "makes attempts/000001.json 0.1"),
    ({"logs/full": untrusted.MAX_FILE_BYTES}, answer_of(("logs/full", b"1")), "makes logs/full 4295.0 MB long"),
    ({}, answer_of(("logs/\x1b]0;evil\x07", b"1")), r"names the file 'logs/ \]0;evil', which is not one of the job's"),
    (MOST_ATTEMPTS, answer_of(("attempts/001025.json", b"{}")), r"makes the attempt files 67\.1 MB long together"),
    (MOST_FILES, answer_of(("logs/a", b"")), "has more than 50000 files"),
])  # fmt: skip
def test_parse_new_bytes_names_the_broken_rule(known_sizes: dict[str, int], stdout: bytes, rule: str) -> None:
    with pytest.raises(BadAnswer, match=rule):
        untrusted.parse_new_bytes(stdout, MARK, known_sizes, MACHINES)
    stdout = answer_of(("status/0.json", b"{}"), ("logs/0", b"1"))
    known_sizes = {"logs/0": 0, **known_sizes}
    assert len(untrusted.parse_new_bytes(stdout, MARK, known_sizes, MACHINES).contents) == 2, "not all of it is full"


@given(NOISE)
def test_parse_listing_gives_paths_below_or_bad_answer(noise: bytes) -> None:
    with contextlib.suppress(BadAnswer):
        for path, size in untrusted.parse_listing(noise).items():
            assert untrusted.is_below(path) and 0 <= size < 10**18


@pytest.mark.parametrize("entry", ["5 ./../x", "5 /etc/passwd", "5 .//etc", "x ./a", "-5 ./a", "5 ", f"{10**18} ./a"])
def test_parse_listing_refuses(entry: str) -> None:
    with pytest.raises(BadAnswer, match="which is not the size and path of a file in the folder"):
        untrusted.parse_listing(f"{entry}\0".encode())


@given(st.binary(max_size=60))
@example(b"1 5 5\n")
@example(b"1 -5 5\n")
@example(b"0 " + b"9" * 5000 + b" 1\n")
def test_parse_exit_gives_bounded_sizes_or_bad_answer(noise: bytes) -> None:
    with contextlib.suppress(BadAnswer):
        parsed = untrusted.parse_exit("abc", b"hello\nabc " + noise, 1000)
        if parsed:
            assert 0 <= parsed[0].stdout_bytes + parsed[0].stderr_bytes <= 1000 and parsed[1] > 0


def test_checkpoint_age_grows_with_time() -> None:
    names = ["000001/step-9.pt", "000002/resume-00000009-abc.pt", "000002/step-00000002.pt", "000002/step-10.pt"]
    assert sorted(reversed(names), key=lambda name: untrusted.checkpoint_age(name) or ()) == names


@given(st.binary(max_size=60))
def test_texts_are_one_printable_line(text: bytes) -> None:
    assert untrusted.one_line(text).isprintable()
    with contextlib.suppress(BadAnswer):
        path = untrusted.absolute_path(text)
        assert path[0] == "/" and path.isprintable()


@pytest.mark.parametrize("path", [
    *("../x", "/x", "a/../../x", "a//b", "", ".", "a/.", "a\0b"),
    *("link/a", "link/deeper/a", "logs/link/a", "logs/linked", "logs/fifo"),
])  # fmt: skip
def test_arrival_folder_writes_into_regular_files_below_it_only(tmp_path: Path, path: str) -> None:
    victim, folder = tmp_path / "victim", ArrivalFolder(tmp_path / "run")
    victim.mkdir()
    (victim / "a").write_bytes(b"mine")
    (folder.path / "logs").mkdir(parents=True)
    for link, target in {"link": victim, "logs/link": victim, "logs/linked": victim / "a"}.items():
        (folder.path / link).symlink_to(target)
    os.mkfifo(folder.path / "logs/fifo")  # its reader is not waited for
    before = {*tmp_path.rglob("*")}
    for write in (lambda: folder.append(path, 0, b"evil"), lambda: folder.overwrite(path, b"evil")):
        with pytest.raises((OSError, ValueError), match=r"symbolic link or not a regular file; remove it|stay below"):
            write()
    if path == "logs/linked":  # a new file replaces the link itself
        folder.create(path, lambda file: file.write(b"new"))
    elif path != "logs/fifo":
        with pytest.raises((OSError, ValueError), match=r"symbolic link or not a regular file; remove it|stay below"):
            folder.create(path, lambda file: file.write(b"evil"))
        assert folder.sizes(["logs", "link"]) == {}
    assert (victim / "a").read_bytes() == b"mine" and {*tmp_path.rglob("*")} == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.data())
def test_append_in_any_order_writes_each_byte_once(tmp_path: Path, content: bytes, data: st.DataObject) -> None:
    folder = ArrivalFolder(tmp_path)
    (tmp_path / "a").unlink(missing_ok=True)
    for _ in range(10):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, len(content)))
        size = folder.append("a", start, content[start:end])
        assert (tmp_path / "a").read_bytes() == content[:size]
    folder.append("a", size, content[size:])
    assert (tmp_path / "a").read_bytes() == content


def test_create_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    folder = ArrivalFolder(tmp_path)
    folder.create("a/b", lambda file: file.write(b"old"))

    def fail(file: object) -> None:
        raise BadAnswer("lies")

    with pytest.raises(BadAnswer):
        folder.create("a/b", fail)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == {"b": b"old"}
