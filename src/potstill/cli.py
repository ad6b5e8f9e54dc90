"""The command line. Heavy imports wait until a command needs them."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

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
    train.add_argument(
        "--resume", action="store_true", help="go on from the newest whole checkpoint in the output folder"
    )
    cache = commands.add_parser(
        "cache",
        help="store what a recipe's teacher says",
        description="Let a recipe's teacher score completions of its prompts, and write what it says to cache.folder. "
        "`potstill train RECIPE teacher.cache=FOLDER` learns from it.",
    )
    cache.add_argument("--resume", action="store_true", help="go on with what the folder has")
    for command, carry_out in ((train, _train), (cache, _cache)):
        command.add_argument(
            "recipe", metavar="RECIPE", help="a YAML file, or potstill:arithmetic for the packaged one"
        )
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", help="change a key of the recipe, e.g. training.max_steps=5"
        )
        command.add_argument(
            "--dump-config", action="store_true", help="print the recipe with its defaults filled in, and stop"
        )
        command.set_defaults(run=carry_out)
    inspect = commands.add_parser(
        "inspect",
        help="look at a teacher's rows",
        description="What a cache, a payload file or a skipped step holds, and what is wrong with it. Exit code 0: "
        "nothing looks wrong; 1: something does; 2: it cannot be read.",
    )
    inspect.add_argument("path", metavar="PATH", help="a cache's folder, a .parquet file, or a skipped-step-*.pt")
    inspect.add_argument(
        "--tokenizer", metavar="MODEL", help="that the rows should be about, and that decodes (default: the teacher's)"
    )
    inspect.add_argument("--sample", metavar="N", type=int, default=0, help="the number of the sample to show")
    inspect.set_defaults(run=_inspect)
    plan = commands.add_parser(
        "plan",
        help="predict the memory of the loss",
        description="Peak memory of the loss by strategy, what fits a budget, and the settings to choose.",
    )
    sizes = plan.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--model", metavar="CONFIG_OR_ID", help="a config.json, a folder with one, or an id on the hub")
    sizes.add_argument("--vocab", metavar="V", type=int, help="the width of the head; needs --hidden")
    plan.add_argument("--hidden", metavar="H", type=int, help="the hidden size")
    plan.add_argument("--tokens", metavar="N", type=int, required=True, help="scored tokens in one call of the loss")
    plan.add_argument("--tp", metavar="T", type=int, default=1, help="ranks that share the vocabulary (default 1)")
    plan.add_argument("--top-k", metavar="K", type=int, required=True, help="ids in a teacher's row")
    plan.add_argument("--budget", metavar="GIB", type=float, help="memory there is for the loss")
    plan.set_defaults(run=_plan)
    bench = commands.add_parser("bench", help="measure exactness, memory, speed or whole steps")
    bench.add_argument("benchmark", choices=("exactness", "memory", "speed", "trainer", "packages"))
    bench.add_argument("options", nargs=argparse.REMAINDER, help="see potstill bench BENCHMARK --help")
    bench.set_defaults(run=_bench)
    # argparse takes no positionals after an option that followed some: overrides may stand on both sides of it.
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(argument.startswith("-") for argument in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.overrides = [*getattr(arguments, "overrides", []), *rest]
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("\npotstill: interrupted", file=sys.stderr)
        return 130


def _train(arguments: argparse.Namespace) -> int:
    return _carry_out(arguments, "potstill.train", "run")


def _cache(arguments: argparse.Namespace) -> int:
    return _carry_out(arguments, "potstill.train.capture", "capture")


def _carry_out(arguments: argparse.Namespace, module: str, function: str) -> int:
    """Let a function of a module do what it does with a recipe."""
    try:
        from transformers.utils import logging

        from potstill.train import RecipeError, load_recipe
        from potstill.train.recipe import dump

        carry_out = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        return _refuse(f"{error.name} is not installed; recipes need: pip install 'potstill[train]'")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        if arguments.dump_config:
            print(dump(recipe), end="")
        else:
            carry_out(recipe, resume=arguments.resume)
    except RecipeError as error:
        return _refuse(str(error))
    except FloatingPointError as error:
        _refuse(str(error))
        return 1
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    try:
        from potstill.inspector import inspect
        from potstill.teachers.payload import PayloadError
    except ModuleNotFoundError as error:
        return _refuse(f"{error.name} is not installed; `potstill inspect` needs: pip install 'potstill[train]'")
    try:
        report = inspect(arguments.path, tokenizer=arguments.tokenizer, number=arguments.sample)
    except (PayloadError, OSError) as error:
        return _refuse(str(error))
    print("\n".join(report.lines))
    return 1 if report.findings else 0


def _plan(arguments: argparse.Namespace) -> int:
    from potstill.plan import Job, report, sizes_of

    if (arguments.vocab is None) != (arguments.hidden is None):
        return _refuse("--vocab and --hidden go together, or --model alone")
    try:
        vocab_size, hidden_size = sizes_of(arguments.model) if arguments.model else (arguments.vocab, arguments.hidden)
        job = Job(arguments.tokens, vocab_size, hidden_size, arguments.top_k)
        print(report(job, arguments.tp, arguments.budget))
    except ValueError as error:
        return _refuse(str(error))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    return import_module(f"potstill.bench.{arguments.benchmark}").main(arguments.options)


def _refuse(message: str) -> int:
    print(f"potstill: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
