"""Training scripts of other projects, that tests run unchanged: which files, of which commit, and how to fetch them.

    python tests/support/third_party.py FOLDER      # make peers calls this

The files are not in this repository. They are downloaded from GitHub, and a file with another content than the tests
were written for is refused.
"""

import hashlib
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / ".venv" / "third_party"
TIMEOUT_SECONDS = 15


@dataclass(frozen=True)
class ThirdPartyFile:
    """One file of another project. `sha256` is that of its content at the commit."""

    repository: str
    commit: str
    path: str
    sha256: str

    @property
    def url(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"

    def path_below(self, folder: Path) -> Path:
        return folder / self.repository / self.path

    def is_in(self, folder: Path) -> bool:
        path = self.path_below(folder)
        return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == self.sha256


EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
ACCELERATE = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
LIGHTNING = ("Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414")
TIMM = ("huggingface/pytorch-image-models", "aa4b5850c1543fa488abf260f18390eda46cf85d")
FILES = {  # by name
    path.rpartition("/")[2]: ThirdPartyFile(*project, path, sha256)
    for project, path, sha256 in (
        (EXAMPLES, "distributed/ddp-tutorial-series/multigpu_torchrun.py",
         "6b0a1568337fe206fa74e971cfeec42317f40b82122475327d50f0a0d37e1ba7"),
        (EXAMPLES, "distributed/ddp-tutorial-series/datautils.py",
         "6af257501c49d1373b9b57f47e54ec9260eef7d97ad46b59cd0280cbbd6cc779"),
        (EXAMPLES, "imagenet/main.py", "f67ca2cd730bf91afe0504694abf07b88cbd03ac8c8a0426023620d29175c158"),
        (ACCELERATE, "examples/complete_nlp_example.py",
         "5e76c87dd371004accde3b544f27ea0c55be8efd1e6ac5e904b9e063a948d1e5"),
        (LIGHTNING, "examples/pytorch/basics/transformer.py",
         "417e7ceb2e0611d7656ea6ea72927c18a04dcf4fda824e3baca2645a9e464367"),
        (TIMM, "train.py", "f0bb70b9e1c8c576eb1f7beba9cb46953d01ec1308d68c59ec055a6266f76388"),
    )
}  # fmt: skip


def fetch(file: ThirdPartyFile, folder: Path) -> None:
    """Download a file below a folder. Raises `OSError`, also when its content is another one than expected."""
    with urllib.request.urlopen(file.url, timeout=TIMEOUT_SECONDS) as response:
        content = response.read()
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise OSError("it has changed")
    path = file.path_below(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def main(folder: Path) -> None:
    """Fetch the files that a folder lacks, and say which could not be had."""
    for name, file in FILES.items():
        if not file.is_in(folder):
            try:
                fetch(file, folder)
            except OSError as error:
                line = f"{name} of {file.repository} could not be fetched ({error}); its tests are skipped"
                print(line, file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
