"""The named groups of options in `--help`, and number types that refuse NaN."""

import click
import pytest

from cluster.backends import catalog
from cluster.backends.aws.backend import AwsBackend
from cluster.cli import launch
from cluster.cli.options import FiniteFloatRange, open_cloud
from cluster.errors import BadInput


def help_text(command: click.Command) -> str:
    return command.get_help(click.Context(command, info_name=command.name, max_content_width=100))


def test_resume_names_no_defaults_because_the_job_keeps_its_values() -> None:
    text = help_text(launch.resume)
    assert "[default" not in text and "--max-hours HOURS" in text and "--on-demand" in text
    assert "[default" in help_text(launch.launch)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_finite_float_range_refuses_nan_and_infinity(text: str) -> None:
    with pytest.raises(click.BadParameter):
        FiniteFloatRange(0).convert(text, None, None)


def test_cloud_is_opened_without_the_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that end rented machines work although a library of another backend is broken."""
    with pytest.raises(BadInput, match=r"^the backend local rents from no cloud$"):
        open_cloud("local")
    for name in catalog.BUILTIN_BACKENDS.keys() - {"aws"}:
        monkeypatch.setitem(catalog.BUILTIN_BACKENDS, name, "cluster.no_such_module:Backend")
    assert type(open_cloud(None)) is AwsBackend.administration
