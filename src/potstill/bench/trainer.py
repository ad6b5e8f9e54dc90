"""`potstill bench trainer`: whole training steps here and in TRL's DistillationTrainer, same pair, prompts and loss.

The loss is the forward KL over the whole vocabulary, on samples of the student. Each repetition starts both trainers
one after the other, with a seed of its own, each in a process of its own, in an environment with TRL;
`scripts/integrations.sh python3 trl` makes one. A ratio is the median over repetitions. Held-out KL is measured by the
same code for both, and their difference is given with its 95 % interval over the seeds.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from potstill.bench.report import parser, table, write_json_lines

PAIRS = {"arithmetic": "recipes/arithmetic.yaml", "smollm2": "recipes/smollm2.yaml"}
STEPS = {"arithmetic": 40, "smollm2": 6}
SIDES = ("trl", "potstill")
T_95 = (0.0, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # of Student's t, by number of values


def main(argv: Sequence[str]) -> int:
    """Print the ratios of both pairs."""
    options = parser("trainer", "Whole training steps beside TRL's DistillationTrainer.")
    options.add_argument("--python", default=".venvs/trl/bin/python", help="of an environment with TRL 1.16")
    options.add_argument("--pair", action="append", choices=PAIRS, help="both by default")
    options.add_argument("--repetitions", type=int, default=5, help="paired runs (default 5)")
    options.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = options.parse_args(argv)
    if arguments.side:
        print(json.dumps(train(arguments.side, arguments.folder, arguments.seed)))
        return 0
    rows, lines = [], []
    for pair in arguments.pair or PAIRS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(pair, folder, 3 if arguments.quick else STEPS[pair])
            runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
            for repetition in range(1 if arguments.quick else arguments.repetitions):
                for side in SIDES:
                    print(f"{pair}, run {repetition + 1}, {side} ...", file=sys.stderr)
                    runs[side].append(in_a_process(arguments.python, side, folder, seed=repetition))
        lines += [{"pair": pair, "side": side, **run} for side in SIDES for run in runs[side]]
        rows.append({"pair": pair, **ratios(runs["potstill"], runs["trl"])})
    print("potstill / TRL, median of paired runs; the KL is that of both\n")
    print(table(rows))
    if arguments.json:
        write_json_lines(arguments.json, "trainer", lines)
    return 0


def ratios(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, str]:
    """A row of the table."""

    def ratio(name: str) -> str:
        return f"{statistics.median(a[name] / b[name] for a, b in zip(ours, theirs, strict=True)):.2f}"

    def kl(runs: list[dict[str, float]], name: str = "kl") -> str:
        return f"{statistics.mean(run[name] for run in runs):.4f}"

    names = {"step": "whole step", "without_rollout": "without rollout", "peak_bytes": "peak memory"}
    return {text: ratio(name) for name, text in names.items()} | {
        "KL before": kl(ours, "kl_before"),
        "KL after": kl(ours),
        "TRL's KL after": kl(theirs),
        "difference": with_interval([a["kl"] - b["kl"] for a, b in zip(ours, theirs, strict=True)]),
    }


def with_interval(values: list[float]) -> str:
    """Their mean and the half width of its 95 % interval, by Student's t."""
    mean = f"{statistics.mean(values):+.4f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {T_95[min(len(values), len(T_95)) - 1] * statistics.stdev(values) / len(values) ** 0.5:.4f}"


def in_a_process(python: str, side: str, folder: Path, seed: int) -> dict[str, float]:
    """What `train` says, run by another interpreter."""
    command = [python, "-m", "potstill.cli", "bench", "trainer", "--side", side, "--folder", str(folder)]
    command += ["--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} failed in {python}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def prepare(pair: str, folder: Path, steps: int) -> None:
    """The pair of a recipe as model folders, warmed up where it says so, and its prompts."""
    from potstill.train import load_recipe
    from potstill.train.load import build_trainer, training_arguments
    from potstill.train.run import warm_up

    recipe = load_recipe(PAIRS[pair], [f"training.output_dir={folder / 'warm-up'}", "training.max_steps=1"])
    trainer = build_trainer(recipe, training_arguments(recipe))
    if recipe.warmup.steps:
        warm_up(recipe, trainer)
    trainer.save_model(str(folder / "student"))
    trainer.teacher.model.save_pretrained(folder / "teacher")  # type: ignore[attr-defined]
    trainer.tokenizer.save_pretrained(folder / "teacher")
    training = {
        name: recipe.training[name]
        for name in ("per_device_train_batch_size", "learning_rate", "adam_beta2")
        if name in recipe.training
    }
    datasets: dict[str, Any] = {"train": trainer.train_dataset, "heldout": trainer.eval_dataset}
    rows = {
        name: [
            {"prompt_ids": row["prompt_ids"], "prompt": trainer.tokenizer.decode(row["prompt_ids"])} for row in data
        ]
        for name, data in datasets.items()
    }
    spec = {"training": training, "steps": steps, "max_new_tokens": recipe.rollout.max_new_tokens, **rows}
    (folder / "spec.json").write_text(json.dumps(spec))


def train(side: str, folder: Path, seed: int) -> dict[str, float]:
    """Train in this process; seconds a step, with and without sampling, peak memory beyond the start's, and KL."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    spec = json.loads((folder / "spec.json").read_text())
    torch.manual_seed(seed)
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder / x) for x in ("student", "teacher"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")
    before = kl(student, teacher, tokenizer, spec)
    sampling = Stopwatch(student)
    marks: list[tuple[float, float]] = []

    class Mark(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks.append((time.perf_counter(), sampling.seconds))

    with tempfile.TemporaryDirectory() as output:
        options = {
            "output_dir": output,
            "max_steps": spec["steps"],
            "seed": seed,
            "logging_steps": 5,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 3,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            **spec["training"],
        }
        trainer = SETUP[side](student, teacher, tokenizer, spec, options)
        trainer.add_callback(Mark())
        start = resident_bytes()
        trainer.train()
        peak = resident_bytes() - start
    (first, sampled_first), (last, sampled_last) = marks[0], marks[-1]  # the first step pays for what is set up once
    steps = len(marks) - 1
    return {
        "step": (last - first) / steps,
        "without_rollout": (last - first - sampled_last + sampled_first) / steps,
        "peak_bytes": peak,
        "kl_before": before,
        "kl": kl(student, teacher, tokenizer, spec),
    }


class Stopwatch:
    """Seconds spent in a model's `generate`."""

    def __init__(self, model: Any) -> None:
        self.seconds, self.generate = 0.0, model.generate
        model.generate = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate."""
        start = time.perf_counter()
        try:
            return self.generate(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def resident_bytes() -> int:
    """The largest resident set of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def kl(student: Any, teacher: Any, tokenizer: Any, spec: dict[str, Any]) -> float:
    """KL(teacher || student) on the student's own samples for the held-out prompts, nats per token."""
    from potstill.rollouts.transformers import TransformersRollouts
    from potstill.teachers.local import ScoredModel
    from potstill.train.families import logit_transform
    from potstill.train.heldout import measure

    sides = [ScoredModel(model, logit_transform(model.config)) for model in (student, teacher)]
    rows = [{"prompt_ids": row["prompt_ids"], "answer": None, "completion_ids": None} for row in spec["heldout"][:64]]
    rollouts = TransformersRollouts(tokenizer, max_new_tokens=spec["max_new_tokens"])
    return measure(sides[0], sides[1], rows, rollouts, batch_size=8, seed=1).means()["kl"]  # type: ignore[arg-type]


def setup_potstill(student: Any, teacher: Any, tokenizer: Any, spec: dict[str, Any], options: dict[str, Any]) -> Any:
    """This library's trainer."""
    from transformers import TrainingArguments

    from potstill.rollouts.transformers import TransformersRollouts
    from potstill.teachers.local import LocalTeacher
    from potstill.train import DistillationTrainer
    from potstill.train.families import logit_transform
    from potstill.train.losses import full_vocab_loss

    transform = logit_transform(teacher.config)
    return DistillationTrainer(
        student,
        TrainingArguments(**options),
        teacher=LocalTeacher(teacher, transform, top_k=1).logits,
        rollouts=TransformersRollouts(tokenizer, max_new_tokens=spec["max_new_tokens"]),
        train_dataset=[{"prompt_ids": x["prompt_ids"], "answer": None, "completion_ids": None} for x in spec["train"]],
        processing_class=tokenizer,
        loss=partial(full_vocab_loss, teacher_transform=transform),
    )


def setup_trl(student: Any, teacher: Any, tokenizer: Any, spec: dict[str, Any], options: dict[str, Any]) -> Any:
    """TRL's."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    return DistillationTrainer(
        student,
        teacher,
        DistillationConfig(
            **options, max_completion_length=spec["max_new_tokens"], beta=0.0, temperature=1.0, top_k=0
        ),
        Dataset.from_list([{"prompt": row["prompt"]} for row in spec["train"]]),
        processing_class=tokenizer,
    )


SETUP = {"trl": setup_trl, "potstill": setup_potstill}
