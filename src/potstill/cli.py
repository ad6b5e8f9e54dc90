"""The command line. Heavy imports wait until a command needs them."""

import argparse
import sys
from collections.abc import Sequence

import potstill


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 2 for a mistake in what the user gave."""
    parser = argparse.ArgumentParser(
        prog="potstill", description="Distil a large language model into a small one, on the student's own samples."
    )
    parser.add_argument("--version", action="version", version=f"potstill {potstill.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="carry out a recipe",
        description="Distil as a recipe says. Writes the model, its card and metrics.jsonl to training.output_dir.",
    )
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file, or potstill:arithmetic for the packaged one")
    train.add_argument(
        "overrides", metavar="key=value", nargs="*", help="change a key of the recipe, e.g. training.max_steps=5"
    )
    train.set_defaults(run=_train)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _train(arguments: argparse.Namespace) -> int:
    try:
        from transformers.utils import logging

        from potstill.train import RecipeError, load_recipe, run
    except ModuleNotFoundError as error:
        return _refuse(f"{error.name} is not installed; `potstill train` needs: pip install 'potstill[train]'")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        run(load_recipe(arguments.recipe, arguments.overrides))
    except RecipeError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("\npotstill: interrupted", file=sys.stderr)
        return 130
    return 0


def _refuse(message: str) -> int:
    print(f"potstill: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
