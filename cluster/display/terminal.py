"""What may reach the terminal: text without control characters, and without the loss of a closed or narrow stream.

Names, reasons and log lines come from machines and from files. A terminal obeys the control characters in them: they
could change its title, its clipboard or what is shown. The command line prints through `TerminalStream`, rich through
the console of `cluster/display/tables.py`, which cleans each piece of text before it gets its color.
"""

import codecs
import contextlib
import io
import locale
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from train.tools.files import FORMER_UTF8_VARIABLE

MAX_MESSAGE_CHARACTERS = 2000

# In this order: OSC and other strings with their end, if they have one; CSI; other escapes; single characters: C0 and
# C1 without newline and tab, marks that change the direction of text, line separators, and surrogates, which cannot be
# written.
CONTROL_PATTERN = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])(?:[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c))?"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean(text: str) -> str:
    """Return a text without control characters and escape sequences. Newlines and tabs stay."""
    return CONTROL_PATTERN.sub("", text)


def cut_text(text: str, max_characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Return both ends of a message, short enough to be read: it may quote a value of any length."""
    half = max_characters // 2
    return text if len(text) <= max_characters else f"{text[:half]} ... {text[-half:]}"


class TerminalStream:
    """Wraps stdout or stderr: removes control characters if it `is_cleaned`, and all text when the reader has gone."""

    def __init__(self, stream: TextIO, is_cleaned: bool = True) -> None:
        self.stream = stream
        self.is_cleaned = is_cleaned

    def write(self, text: str) -> int:
        """Write a text. Raises `OSError`, but not when the reader has gone."""
        with discard_when_reader_is_gone(self.stream):
            self.stream.write(clean(text) if self.is_cleaned else text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered. Raises `OSError`, but not when the reader has gone."""
        with discard_when_reader_is_gone(self.stream):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:  # Any: whatever attribute of the stream it is
        return getattr(self.stream, name)


@contextlib.contextmanager
def discard_when_reader_is_gone(stream: TextIO) -> Iterator[None]:
    """Send a stream's output to /dev/null once a write within the `with` block finds that its pipe is closed."""
    try:
        yield
    except BrokenPipeError:
        discard(stream)


def discard(stream: TextIO) -> None:
    """Send the rest of a stream's output to /dev/null: at exit Python writes its buffer once more and would fail."""
    with contextlib.suppress(OSError, ValueError):  # the stream has no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def styled_stream(to_stderr: bool = False) -> TextIO:
    """Return stdout or stderr without cleaning, for rich: its console cleans the text, then adds escape sequences."""
    stream = sys.stderr if to_stderr else sys.stdout
    stream = stream.stream if isinstance(stream, TerminalStream) else stream
    return cast(TextIO, TerminalStream(stream, is_cleaned=False))


@contextlib.contextmanager
def clean_output() -> Iterator[None]:
    """Remove control characters from all output of the `with` block."""
    if isinstance(sys.stdout, TerminalStream):
        yield
        return
    stdout, stderr = (cast(TextIO, TerminalStream(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield


def prepare_standard_streams() -> None:
    """Make stdin, stdout and stderr usable, whatever the shell has set them to. To be called once, at the start.

    A closed one (`imgnet-cluster ls >&-`) becomes /dev/null: else the next file that is opened would get its
    descriptor, and with it the output of child processes. In a locale that has ASCII only, output is UTF-8.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "r" if descriptor == 0 else "w"))
        elif isinstance(stream, io.TextIOWrapper) and descriptor > 0:
            is_forced = FORMER_UTF8_VARIABLE in os.environ and not os.environ.get("PYTHONIOENCODING")
            encoding = locale.getencoding() if is_forced else stream.encoding
            encoding = "utf-8" if codecs.lookup(encoding).name == "ascii" else encoding
            stream.reconfigure(encoding=encoding, errors="replace", line_buffering=True)
