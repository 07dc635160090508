"""Targets of notifications: a command of the user, or the URL of a webhook. Light: `launch --help` imports this."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from cluster.errors import BadInput

NO_TARGET = "none"  # for one launch without the target of the configuration file
WEBHOOK_SCHEMES = ("http", "https")
FIND_COMMAND_SECONDS = 5.0


def parse_target(text: str) -> str:
    """Return a target as it is used. Raises `ValueError`, without the URL, which is a secret."""
    target = text.strip()
    if not target or not target.isprintable():
        raise ValueError("it must be a command or a URL on one line.")
    scheme, separator, _ = target.partition("://")
    if not separator or not scheme.isalnum():  # a command may have a URL among its arguments
        return target
    if scheme.lower() not in WEBHOOK_SCHEMES:
        raise ValueError(f"{scheme}:// is no webhook; it must begin with https:// or http://, or be a command.")
    try:
        host, _ = urlsplit(target).hostname, urlsplit(target).port
    except ValueError:
        host = None
    if not host or " " in target:
        raise ValueError("the URL has no host, or a part that no URL has.")
    return target


def is_webhook(target: str) -> bool:
    """Whether a target is the URL of a webhook."""
    return target.lower().startswith(tuple(f"{scheme}://" for scheme in WEBHOOK_SCHEMES))


def describe_target(target: object) -> str:
    """Return a target for people: of a URL the host, of a command the program; whoever knows the rest can post."""
    text = str(target)
    if not is_webhook(text):
        program, space, _ = text.partition(" ")
        if "=" in program or "://" in program:
            return "..."
        return f"{program} ..." if space else program
    parts = urlsplit(text)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}/..."


def chosen_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """Return the targets once each, () with "none" among them. Raises `BadInput` for a command that is not found."""
    if NO_TARGET in targets:
        return ()
    chosen = tuple(dict.fromkeys(targets))
    for target in chosen:
        if is_webhook(target):
            continue
        try:
            program = next(iter(shlex.split(target)), "")
        except ValueError as error:
            raise BadInput(f"--notify {target}: is no command: {error}") from None
        if "/" in program and not program.startswith(("/", "~", "$")):
            raise BadInput(
                f"--notify {target}: give the whole path, because the command is run in another folder: "
                f"{Path.cwd() / program}"
            )
        if not _is_found(program):
            raise BadInput(f"--notify {target}: there is no program {program} here")
    return chosen


def _is_found(program: str) -> bool:
    """Whether a shell finds a program; True also for words that only the shell can expand."""
    if shutil.which(Path(program).expanduser()) or not re.fullmatch(r"[\w./+~-]+", program):
        return True
    argv = ["sh", "-c", 'command -v -- "$1"', "sh", program]  # built into the shell, such as "exec"
    return subprocess.run(argv, capture_output=True, timeout=FIND_COMMAND_SECONDS).returncode == 0
