"""Options declared as fields of a dataclass: their conversions, and which of them are options of a launch."""

from dataclasses import MISSING, dataclass, field
from pathlib import Path

from train.engine.options import parse_target
from train.tools.option_fields import OptionSet, option_field


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
