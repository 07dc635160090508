"""Changes fields of a recipe as text asks for, for `--set optim.weight_decay=1e-4`."""

import ast
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from .components import Comm, Model, Optim
from .schema import Phase, Recipe

PartT = TypeVar("PartT", Model, Optim, Comm, Phase)


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Return the recipe with other values in fields of `model`, `optim`, `comm` or a phase, or in one of four others.

    These are `patience`, `transform`, `kernel_search` and `graphs`. Phases count from 1. A value is a Python literal,
    such as (0.9, 0.95) or None; anything else is a text. Raises `ValueError` that names the setting.
    """
    for setting in settings:
        path, _, text = setting.partition("=")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        try:
            match path.split("."):
                case ["model" | "optim" | "comm" as part, field]:
                    recipe = replace(recipe, **{part: _changed(getattr(recipe, part), field, value)})
                case ["patience" | "transform" | "kernel_search" | "graphs" as field]:
                    recipe = replace(recipe, **{field: value})
                case ["phases", number, field] if number in map(str, range(1, len(recipe.phases) + 1)):
                    phases = list(recipe.phases)
                    phases[int(number) - 1] = _changed(phases[int(number) - 1], field, value)
                    recipe = replace(recipe, phases=phases, tables={})
                case ["phases", number, _] if number.isdecimal():
                    raise ValueError(f"the recipe has no phase {number}; its last is phase {len(recipe.phases)}")
                case _:
                    raise ValueError(
                        f"{path}: must be model.FIELD, optim.FIELD, comm.FIELD, patience, transform, kernel_search, "
                        f"graphs, or phases.N.FIELD with N from 1 to {len(recipe.phases)}"
                    )
        except ValueError as error:
            raise ValueError(f"--set {setting}: {error}") from error
    return recipe


def _changed(part: PartT, field: str, value: object) -> PartT:
    names = [known.name for known in fields(part)]
    if field not in names:
        raise ValueError(f"{type(part).__name__} has no field {field!r}; fields: {', '.join(names)}")
    return replace(part, **{field: value})  # type: ignore[arg-type]
