"""What a recipe file imports: `from train.recipe import Data, Model, Optim, Phase, Recipe`."""

from .components import IMAGENET, MODELS, SAMPLE, Comm, Data, Model, Optim
from .schema import Phase, Recipe, check_phases

__all__ = ["IMAGENET", "MODELS", "SAMPLE", "Comm", "Data", "Model", "Optim", "Phase", "Recipe", "check_phases"]
