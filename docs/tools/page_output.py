"""Where the scripts of this folder write their page."""

import sys
from pathlib import Path


def write_page(page: str) -> None:
    """Write a page of the documentation to the file that the command line names, or to stdout."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page)
    else:
        sys.stdout.write(page)
