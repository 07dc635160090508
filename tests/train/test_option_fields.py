"""Options declared as fields of a dataclass: their checks in Python, and the argparse options made from them."""

import argparse
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from train.engine.options import parse_target
from train.tools.option_fields import OptionError, OptionSet, add_arguments, option_field


@dataclass(frozen=True, kw_only=True)
class Cooling(OptionSet):
    fans: int = option_field(2, group="Machines", minimum=0, maximum=4, help="Number of fans.")
    noise: float | None = option_field(None, minimum=0, is_minimum_open=True, help="Not an option of a launch.")


@dataclass(frozen=True, kw_only=True)
class Options(OptionSet):
    out: Path = option_field(MISSING, group="Output", help="Where to write.")
    names: tuple[str, ...] = option_field((), "--name", group="Data", help="Several.")
    is_fast: bool = option_field(True, "--slow", group="Data", help="100 % slow.")
    mode: str = option_field("a", group="Data", help="Mode.", switches={"a": "First.", "b": "Second."})
    target: str = option_field("", group="Data", help="Accuracy.", parse=parse_target)
    cooling: Cooling = field(default_factory=Cooling)
    backend: str = "no option"


def parse(*argv: str) -> Any:
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_arguments(parser, Cooling)
    return vars(parser.parse_args(argv))


@pytest.mark.parametrize(("options", "values", "reason"), [
    (Cooling, {"fans": 5}, "'--fans': 5 is not in the range 0<=x<=4."),
    (Cooling, {"fans": 2.5}, "'--fans': 2.5 is not a valid integer."),
    (Cooling, {"fans": True}, "'--fans': True is not a valid integer."),
    (Cooling, {"fans": None}, "'--fans': None is not a valid integer."),
    (Cooling, {"fans": "many"}, "'--fans': 'many' is not a valid integer."),
    (Cooling, {"noise": 0}, "'--noise': 0.0 is not in the range x>0."),
    (Cooling, {"noise": float("nan")}, "'--noise': nan is not a finite number"),
    (Cooling, {"noise": "inf"}, "'--noise': inf is not a finite number"),
    (Cooling, {"noise": []}, r"'--noise': [] is not a valid float."),
    (Options, {"mode": "c"}, "'--a' / '--b': 'c' is not one of 'a', 'b'."),
    (Options, {"is_fast": "no"}, "'--slow': 'no' is not a valid bool."),
    (Options, {"names": ("x", 1)}, "'--name': 1 is not a valid str."),
    (Options, {"target": "93"},
     "'--target': '93' is no target; they look like top5=93 or top1=76.1, in percent"),
])  # fmt: skip
def test_option_set_refuses_bad_values(options: Any, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError) as caught:
        options(**({"out": Path("x")} if options is Options else {}), **values)
    assert str(caught.value) == f"Invalid value for {reason}"


def test_option_set_parses_texts_and_converts_numbers() -> None:
    options = Options(out="folder", names="one", target="top1=50.0")  # type: ignore[arg-type]
    assert (options.out, options.names, options.target) == (Path("folder"), ("one",), "top1=50")
    cooling = Cooling(fans="3", noise=1)  # type: ignore[arg-type]
    assert cooling == Cooling(fans=3, noise=1.0) and isinstance(cooling.noise, float)


def test_launch_options_are_those_with_a_group_also_of_nested_classes() -> None:
    assert [option.name for option in Options.launch_options()] == ["out", "names", "is_fast", "mode", "target", "fans"]
    by_name = {option.name: option for option in Options.launch_options()}
    assert by_name["fans"].full_help() == "Number of fans.  [default: 2]  [0<=x<=4]"
    assert (by_name["mode"].all_flags, by_name["is_fast"].all_flags) == (("--a", "--b"), ("--slow",))


def test_changed_takes_the_values_of_launch_options_only() -> None:
    options = Options(out=Path("x")).changed({"fans": "1", "noise": 3.0, "backend": "y", "other": 0})
    assert options == Options(out=Path("x"), cooling=Cooling(fans=1))


def test_add_arguments_returns_only_given_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse() == {} and parse("--fans", "3", "--noise", "0.5") == {"fans": "3", "noise": "0.5"}
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_arguments(parser, Options)
    assert vars(parser.parse_args(["--out", "x", "--slow"])) == {"out": "x", "is_fast": False}
    assert "100 % slow." in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "required: --out" in capsys.readouterr().err
