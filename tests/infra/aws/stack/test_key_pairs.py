"""SSH key pairs of a person and of a launch."""

import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.aws.stack import key_pairs
from infra.errors import CloudError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_ensure_own_key_generates_one_private_file_also_in_parallel(home: Path) -> None:
    start = threading.Barrier(4)

    def read_key(_: int) -> bytes:
        start.wait(120)
        return key_pairs.ensure_own_key().read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(read_key, range(4)))) == 1
    path = key_pairs.ensure_own_key()
    assert path == home / ".imgnet/aws/id_ed25519" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.with_suffix(".pub").read_text().startswith(key_pairs.read_public_key(path))
    assert sorted(file.name for file in path.parent.iterdir()) == ["id_ed25519", "id_ed25519.pub"]


def test_generate_key_pair_halves_belong_together(home: Path) -> None:
    private, public = key_pairs.generate_key_pair()
    path = home / "key"
    path.touch(mode=0o600)
    path.write_text(private)
    assert key_pairs.read_public_key(path) == public != key_pairs.generate_key_pair()[1]
    assert key_pairs.key_pair_name(public) == key_pairs.key_pair_name(f"{public} me@here")


def test_unreadable_key_names_the_file_or_the_tool(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, damaged = home / "locked", home / "damaged"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True)
    damaged.write_text("no key\n")
    damaged.chmod(0o600)
    for path, reason in ((damaged, ""), (locked, ".*passphrase")):
        with pytest.raises(CloudError, match=f"^{path}: {reason}"):
            key_pairs.read_public_key(path)
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(CloudError, match=r"ssh-keygen cannot be run .*install OpenSSH"):
        key_pairs.ensure_own_key()
