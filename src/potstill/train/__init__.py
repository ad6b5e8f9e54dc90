"""The trainer: recipes, batches and the Hugging Face Trainer subclass.

`run(load_recipe("recipe.yaml"))` is `potstill train recipe.yaml`; DistillationTrainer is for models and data at hand.
"""

from potstill.train.recipe import Recipe, load_recipe
from potstill.train.run import RunResult, run
from potstill.train.strict import RecipeError
from potstill.train.trainer import DistillationTrainer

__all__ = ["DistillationTrainer", "Recipe", "RecipeError", "RunResult", "load_recipe", "run"]
