"""The trainer: recipes, batches and the Hugging Face Trainer subclass."""

from potstill.train.recipe import Recipe, load_recipe
from potstill.train.run import RunResult, run
from potstill.train.strict import RecipeError
from potstill.train.trainer import DistillationTrainer

__all__ = ["DistillationTrainer", "Recipe", "RecipeError", "RunResult", "load_recipe", "run"]
