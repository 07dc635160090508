"""What a recipe file imports: `from train.recipe import Data, Model, Optim, Phase, Recipe`, or `Command`."""

from .command import Command
from .components import IMAGENET, MODELS, SAMPLE, Comm, Data, Model, Optim
from .schema import Phase, Recipe

__all__ = ["IMAGENET", "MODELS", "SAMPLE", "Comm", "Command", "Data", "Model", "Optim", "Phase", "Recipe"]
