"""Fields of a recipe that `--set` replaces."""

import pytest

from train.recipe import SAMPLE, Model, Phase, Recipe
from train.recipe.settings import with_settings

ROWS = (Phase(epochs=(0, 2), size=64, batch=4, lr=0.1), Phase(epochs=(2, 4), size=64, batch=4, lr=0.01))
RECIPE = Recipe(name="some", data=SAMPLE, model=Model(name="resnet18"), machines=2, tables={2: ROWS, 4: ROWS[:1]})


def test_settings_replace_fields_one_after_the_other() -> None:
    settings = [
        *("optim.weight_decay=1e-4", "optim.name=adamw", "optim.betas=(0.9, 0.95)", "optim.name=lamb"),
        *("model.name=timm:resnet26", "model.fc_std=None", "comm.hook=fp16", "phases.2.lr=(0.1, 0)", "patience=3"),
        *("transform=mine:augment", "kernel_search=True", "phases.2.augment=trivial"),
    ]
    recipe = with_settings(RECIPE, settings)
    assert (recipe.optim.weight_decay, recipe.optim.name, recipe.optim.betas) == (1e-4, "lamb", (0.9, 0.95))
    assert (recipe.model.name, recipe.model.fc_std, recipe.comm.hook) == ("timm:resnet26", None, "fp16")
    assert (recipe.patience, recipe.transform, recipe.kernel_search) == (3, "mine:augment", True)
    assert [phase.augment for phase in recipe.phases] == [True, "trivial"]
    assert [phase.lr for phase in recipe.phases] == [0.1, (0.1, 0)] and recipe.epochs == 4
    assert with_settings(recipe, settings) == recipe, "the trainer replaces them again"


@pytest.mark.parametrize(("setting", "reason"), [
    ("optim.lr=0.1", "Optim has no field 'lr'; fields: name, momentum"),
    ("optim.clip=much", "optim, clip: must be a finite number, not 'much'"),
    ("lr=0.1", "lr: must be model.FIELD, optim.FIELD, comm.FIELD, patience, transform, kernel_search, graphs, or"),
    ("kernel_search=3", "kernel_search: must be True or False, not 3"),
    ("phases.3.lr=0.1", "the recipe has no phase 3; its last is phase 2"),
    ("phases.2.epochs=(3, 4)", "starts at 3, but must start at 2"),
])  # fmt: skip
def test_wrong_setting_is_named_with_the_reason(setting: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^--set ") as caught:
        with_settings(RECIPE, [setting])
    assert f"--set {setting}: " in str(caught.value) and reason in str(caught.value)
