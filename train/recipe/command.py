"""A training script of the user as plain data: a command is what to run, on how many machines, with which variables.

    recipe = Command(argv=["python", "train.py", "--lr", "0.1"], machines=4)

Its processes get torchrun's environment variables. It is checked when built: a `ValueError` names field and value.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Literal, Self

from train.tools.option_fields import OptionSet, option_field

from . import validators
from .schema import check_machine_types

SAVE_SIGNALS = ("TERM", "INT", "USR1", "USR2", "HUP")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What the agent sets for each process; a value of the user would break the job.
RESERVED_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    *("IMGNET_CHECKPOINTS", "IMGNET_EVENTS", "IMGNET_DATA", "IMGNET_PROGRESS"),
)
INTERPRETERS = re.compile(r"(python[0-9.]*|bash|sh)")
LONG_FLAGS_WITH_VALUE = ("--rcfile", "--init-file", "--check-hash-based-pycs")  # of bash and Python
MAX_SHOWN_CHARACTERS = 500  # of a command, whose whole text is in job.json


def parse_procs(text: str) -> int | str:
    """Return a number of processes, or "gpu". Raises `ValueError` for another text."""
    if text != "gpu" and not text.isdecimal():
        raise ValueError(f"{text!r} is neither a number nor the word gpu")
    return text if text == "gpu" else int(text)


def parse_signal(text: str) -> str:
    """Return the name of a signal without "SIG". Raises `ValueError` for one that asks nobody to save."""
    name = text.upper().removeprefix("SIG")
    if name not in SAVE_SIGNALS:
        raise ValueError(f"must be one of {', '.join(SAVE_SIGNALS)}, not {text}")
    return name


@dataclass(frozen=True, kw_only=True)
class Command(OptionSet):
    """A command that trains: each of its processes is one rank, as under torchrun.

    The fields with a help text are options of `imgnet-cluster run` too.

    Attributes:
        argv: The command and its arguments. It runs in the job's copy of the user's project.
        name: Name of the job's work, shown everywhere. Default: that of the script, without ".py".
        machines: Number of machines. Default None: one, or with --ssh all machines of the file. The option precedes it.
        env: Environment variables of the processes, by name.
        secrets: Names of environment variables whose values come from the launching environment and are in no file of
            the job that comes home.
        types: Machine types to rent, in order of preference. Default (): those of the options.
    """

    argv: Sequence[str]
    name: str = ""
    machines: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    procs: int | Literal["gpu"] = option_field(
        "gpu",
        metavar="P|gpu",
        group="Machines",
        parse=parse_procs,
        minimum=1,
        maximum=1000,
        help="Processes of each machine: a number, or gpu for one per GPU.",
        default_text="gpu; without GPUs, 1",
    )
    requirements: str = option_field(
        "",
        metavar="FILE",
        group="Command",
        help="Requirements file of the project; its packages are installed before the command starts.",
        default_text="on other machines uv.lock, requirements.txt or pyproject.toml; on this computer the active "
        "environment is used",
    )
    image: str = option_field(
        "", metavar="IMAGE", group="Command", help="Run the processes in containers of this image, by docker."
    )
    progress: str = option_field(
        "",
        metavar="PATTERN",
        group="Command",
        help="Regular expression of the lines by which rank 0 tells its step, such as 'step (?P<step>\\d+)'. Further "
        "groups: steps, epoch, epochs, loss, lr, images_per_second.",
    )
    stall_seconds: float = option_field(
        0.0,
        metavar="S",
        group="Recovery",
        minimum=0,
        help="After this time without progress, the command counts as failed.",
        default_text="no limit",
    )
    retries: int = option_field(
        0,
        metavar="N",
        group="Recovery",
        minimum=0,
        help="How many failures of its own the command may have; lost machines do not count.",
    )
    save_signal: str = option_field(
        "TERM",
        metavar="NAME",
        group="Recovery",
        parse=parse_signal,
        help="Signal that asks the processes to save and exit: TERM, INT, USR1, USR2 or HUP.",
        default_text="TERM",
    )
    elastic: bool = option_field(
        True,
        "--elastic/--no-elastic",
        group="Recovery",
        help="After a loss, go on with the machines that are left, or wait for all.",
        default_text="go on",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.argv, str) or not all(isinstance(word, str) and "\0" not in word for word in self.argv):
            raise ValueError('command, argv: must be a list of texts, such as ["python", "train.py"]')
        if not self.argv or not self.argv[0]:
            raise ValueError("command, argv: names no program")
        object.__setattr__(self, "argv", tuple(self.argv))
        name = self.name or self._default_name()
        where = f"command {name!r}"
        if not isinstance(name, str) or any(character in "/\\\0\n" for character in name):
            raise ValueError(f"{where}, name: must be a text without slashes or line ends")
        object.__setattr__(self, "name", name)
        if self.machines is not None:
            validators.check_int(where, "machines", self.machines, 1)
        if not isinstance(self.env, Mapping):
            raise ValueError(f"{where}, env: must be values by name, not {self.env!r}")
        for variable, value in self.env.items():
            check_variable(variable)
            if not isinstance(value, str) or "\0" in value:
                raise ValueError(f"{where}, env: the value of {variable} must be a text")
        for variable in self.secrets:
            check_variable(variable)
        object.__setattr__(self, "env", dict(self.env))
        object.__setattr__(self, "secrets", tuple(self.secrets))
        object.__setattr__(self, "types", check_machine_types(where, self.types))

    def _default_name(self) -> str:
        script = self.script or self.module or self.argv[0]
        return PurePosixPath(script).name.removesuffix(".py") or "command"

    @property
    def script(self) -> str:
        """The file that an interpreter is to run, or the program itself; "" for `python -m` and `python -c`."""
        if not INTERPRETERS.fullmatch(PurePosixPath(self.argv[0]).name):
            return self.argv[0]
        words = self._words_after_flags()
        return words[0] if words and not words[0].startswith("-") else ""

    @property
    def module(self) -> str:
        """The module that `python -m` runs, "" when the command runs none."""
        words = self._words_after_flags()
        return words[1] if len(words) > 1 and words[0] == "-m" else ""

    def _words_after_flags(self) -> list[str]:
        """Return the words from the script, -m or -c on, after other flags: `bash -euo pipefail -c`, `python -Im`."""
        is_python = PurePosixPath(self.argv[0]).name.startswith("python")
        last_flags, flags_with_value = ("mc", "WX") if is_python else ("cs", "oO")
        words = list(self.argv[1:])
        while words and words[0].startswith("-" if is_python else ("-", "+")) and words[0] not in ("-", "--"):
            word = words.pop(0)
            if word.startswith("--"):
                words = words[word in LONG_FLAGS_WITH_VALUE :]
                continue
            for index, letter in enumerate(word[1:], 1):
                value = [word[index + 1 :]] if is_python and word[index + 1 :] else []
                if letter in last_flags:
                    return [f"-{letter}", *value, *words]
                if letter in flags_with_value:
                    words = words if value else words[1:]
                if value and letter in flags_with_value:
                    break
        return words[words[:1] == ["--"] :]

    @property
    def gpus(self) -> int:
        """The number of processes of a machine of which nobody knows how many GPUs it has."""
        return 1 if self.procs == "gpu" else self.procs

    @property
    def text(self) -> str:
        """The command as it is typed in a shell."""
        return shlex.join(self.argv)

    @property
    def short_text(self) -> str:
        """The command in one line, as it is shown. The end of a long one is left out."""
        line = " ".join(self.text.split())
        return line if len(line) <= MAX_SHOWN_CHARACTERS else f"{line[: MAX_SHOWN_CHARACTERS - 3]}..."

    def for_machines(self, machines: int) -> Self:
        """Return the command for a number of machines: itself, as it has no schedule."""
        return self

    def settings(self, world_size: int) -> dict[str, int | float | str]:
        """Return the arguments of the command as one flat row, as TensorBoard and `ls -o json` compare jobs.

        "--lr 0.1", "--lr=0.1" and "lr=0.1" (as Hydra has it) are the setting lr; a flag without a value is 1.
        """
        settings: dict[str, int | float | str] = {"command": self.name, "world": world_size}
        words = list(self.argv[1:])
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if not word.startswith("-"):
                if equals and VARIABLE_NAME.fullmatch(name.replace(".", "_")):
                    settings[name] = _number(value)
                continue
            is_number = not isinstance(_number(word), str)  # the value of the option before it
            name = name.lstrip("-")
            following = words[index + 1] if index + 1 < len(words) else "-"
            if is_number or not name or word in ("-m", "-c", "-u"):
                continue
            is_value = not following.startswith("-") or isinstance(_number(following), int | float)
            settings[name] = _number(value) if equals else _number(following) if is_value else 1
        return settings

    def to_json(self) -> dict[str, Any]:  # Any: JSON of any shape
        """Return plain data from which `from_json` builds an equal command."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:  # Any: JSON that may be damaged
        """Build a command from what `to_json` returned. Raises `ValueError` when it describes no valid command."""
        try:
            known = {known.name for known in fields(cls)}
            return cls(**{name: item for name, item in value.items() if name in known})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"not a command's JSON: {error}") from error


def check_variable(name: str) -> None:
    """Raise `ValueError` when the name cannot be that of an environment variable, or the agent sets the variable."""
    if not isinstance(name, str) or not VARIABLE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of an environment variable")
    if name in RESERVED_VARIABLES:
        raise ValueError(f"{name} is set for each process by the job itself")


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
