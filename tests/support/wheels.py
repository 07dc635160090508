"""Writes wheels of small packages that are installed nowhere, for tests of pip without a network."""

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, requires: str = "") -> None:
    """Write a wheel of version 1.5 with one module, in which NAME is the name of the package."""
    folder.mkdir(exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-1.5.dist-info"
    requirement = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{module}.py": f"NAME = {name!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n{requirement}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{module}-1.5-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
