"""The names that users give their jobs. Imports only what `launch --help` needs."""

import re


def check_name(text: str) -> str:
    """Return a name for a job. Raises `ValueError` for one that could be an ID, an option or a path."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", text, re.ASCII | re.IGNORECASE):
        raise ValueError(f"{text!r} is no name: 1 to 63 letters, digits, '-', '_' and '.', a letter or a digit first")
    if re.match(r"(job-?)?[0-9]+(-|$)", text, re.IGNORECASE):
        raise ValueError(f"{text!r} looks like the ID of a job; begin with another word")
    return text
