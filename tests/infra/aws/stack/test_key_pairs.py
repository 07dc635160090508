import stat
import subprocess
import threading
from pathlib import Path

import pytest

from infra.aws.errors import CloudError
from infra.aws.stack import key_pairs

KNOWN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_persons_key_is_made_once_for_them_alone(home: Path) -> None:
    path = key_pairs.ensure_own_key()
    assert path == home / ".imgnet/aws/id_ed25519" and stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    assert key_pairs.ensure_own_key() == path and path.read_bytes() == content
    assert path.with_suffix(".pub").read_text().startswith(key_pairs.read_public_key(path))
    assert sorted(one.name for one in path.parent.iterdir()) == ["id_ed25519", "id_ed25519.pub"]


def test_two_who_make_it_at_once_agree_on_one(home: Path) -> None:
    found: list[bytes] = []
    start = threading.Barrier(4)

    def one() -> None:
        start.wait(20)
        found.append(key_pairs.ensure_own_key().read_bytes())

    threads = [threading.Thread(target=one) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert len(found) == 4 and len(set(found)) == 1


def test_the_public_half_is_that_of_the_private_one(home: Path) -> None:
    private, public = key_pairs.generate_key_pair()
    path = home / "key"
    path.touch(mode=0o600)
    path.write_text(private)
    assert private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----") and private.endswith("\n")
    assert (
        key_pairs.read_public_key(path) == public
        and len(public.split()) == 2
        and key_pairs.generate_key_pair()[1] != public
    )


def test_a_name_is_of_the_key_whatever_its_comment() -> None:
    assert key_pairs.key_pair_name(KNOWN) == key_pairs.key_pair_name(KNOWN + " me@here") == "imgnet-f83898df0bef"


def test_a_key_that_is_none_and_a_missing_ssh_keygen_are_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / "none"
    path.write_text("no key\n")
    path.chmod(0o600)
    with pytest.raises(CloudError, match=f"^{path}: "):
        key_pairs.read_public_key(path)
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(CloudError, match=r"ssh-keygen cannot be run .*install OpenSSH"):
        key_pairs.ensure_own_key()


def test_a_key_with_a_passphrase_does_not_ask_for_it(home: Path) -> None:
    path = home / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(path)], check=True)
    with pytest.raises(CloudError, match="passphrase"):
        key_pairs.read_public_key(path)
