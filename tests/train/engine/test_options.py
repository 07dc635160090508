"""The trainer's options from the command line and from a file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from train.engine.main import choose_recipe
from train.engine.options import TrainOptions, parse_run_options
from train.tools.records import encode


def test_precision_of_the_recipe_and_of_the_option(tmp_path: Path) -> None:
    path = tmp_path / "tiny.py"
    path.write_text(
        "from train.recipe import *\n"
        "recipe = Recipe(name='tiny', data=SAMPLE, model=Model(name='resnet10_tiny'), precision='fp16',\n"
        "                phases=[Phase(epochs=(0, 1), size=32, batch=8, lr=0.1)])\n"
    )
    for words, expected in (([], "fp16"), (["--precision", "bf16"], "bf16")):
        recipe = choose_recipe(parse_run_options([str(path), "--out", str(tmp_path), *words]))
        assert recipe.precision == expected
    with pytest.raises(SystemExit):
        parse_run_options([str(path), "--out", str(tmp_path), "--precision", "int8"])
    with pytest.raises(ValueError, match="precision: 'int8' is unknown; known are auto, bf16, fp16, fp32"):
        replace(recipe, precision="int8")


def test_options_file_and_command_line_give_the_same_options(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    options = TrainOptions(data="/images", workers=0, skip_bad=True, target="top5=93", scale=0.5, max_steps=7, gpus=8)
    file.write_text(json.dumps(encode(options)))
    typed = ["--data", "/images", "--workers", "0", "--skip-bad", "--target", "top5=93", "--scale", "0.5"]
    per_process = ["r.json", "--out", "o", "--attempt", "3"]
    from_file = parse_run_options([*per_process, "--options", str(file)])
    assert from_file == parse_run_options([*per_process, *typed, "--max-steps", "7", "--gpus", "8"])
    overridden = parse_run_options([*per_process, "--options", str(file), "--max-steps", "9"])
    assert (overridden.max_steps, overridden.scale, overridden.attempt) == (9, 0.5, 3)


@pytest.mark.parametrize(("content", "message"), [
    (None, "options.json: there is no such file"),
    ('{"scale": 0.', "options.json: Expecting ',' delimiter: line 1 column 12"),
    ('{"scale": "half"}', "Expected `float`, got `str`"),
    ('{"scale": 2}', "Invalid value for '--scale': 2.0 is not in the range 0<x<=1."),
])  # fmt: skip
def test_damaged_options_file_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    file = tmp_path / "options.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as caught:
        parse_run_options(["r.json", "--out", "o", "--options", str(file)])
    assert caught.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
