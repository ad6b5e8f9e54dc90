"""The model card: what was distilled from what, how, with what result, under which licence."""

from pathlib import Path

import yaml
from huggingface_hub import ModelCard

import potstill
from potstill.train.recipe import PACKAGED, Recipe

ROWS = (
    ("eval_kl", "forward KL, teacher to student (nats)"),
    ("eval_student_entropy", "entropy of the student (nats)"),
    ("eval_teacher_entropy", "entropy of the teacher (nats)"),
    ("eval_mean_length", "length of a completion (tokens)"),
    ("eval_truncated_share", "completions cut off by their length"),
    ("eval_exact_match", "exact match, greedy"),
)
SHARES = ("eval_truncated_share", "eval_exact_match")


def comparison(before: dict[str, float], after: dict[str, float]) -> str:
    """The held-out metrics before and after as a Markdown table, which reads well on a terminal too."""
    lines = [f"| {'held-out prompts':38} |   before |    after |", f"|{'-' * 40}|{'-' * 9}:|{'-' * 9}:|"]
    for key, title in ROWS:
        if key in after:
            style = "8.1%" if key in SHARES else "8.4f"
            values = [format(side[key], style) if key in side else f"{'-':>8}" for side in (before, after)]
            lines.append(f"| {title:38} | {' | '.join(values)} |")
    return "\n".join(lines)


def model_card(recipe: Recipe, before: dict[str, float], after: dict[str, float]) -> str:
    """README.md of the saved model, with metadata that the Hub understands."""
    teachers = [spec.model for spec in (recipe.teachers or {"": recipe.teacher}).values()]
    teacher = teachers[0]
    licences = {name: licence_of(name) for name in (*teachers, recipe.student.model) if name is not None}
    metadata = {
        "library_name": "transformers" if recipe.student.lora is None else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["potstill", "distillation"],
    }
    base = teacher if recipe.student.lora is None else str(recipe.student.model)
    if not Path(base).is_dir() and base != PACKAGED:
        metadata["base_model"] = base
    if licence := licences[teacher]:
        metadata["license"] = licence
    origin = {
        recipe.student.model is not None: f"The student started as `{recipe.student.model}`.",
        recipe.student.prune is not None: "The student started as a copy of the teacher with fewer layers.",
        recipe.student.config is not None: "The student started from random weights.",
    }[True]
    licence_lines = [
        f"- `{name}`: {licence or 'not stated where it was loaded from; find out before you publish this model'}"
        for name, licence in licences.items()
    ]
    source = recipe.data.train if recipe.teacher.cache is None else recipe.teacher.cache
    if source != PACKAGED:
        licence_lines.append(f"- the data, `{source}`: not known here; look it up where the data come from")
    sampled = recipe.rollout.lmbda
    source = "that the student sampled itself" if sampled == 1 else f"of which the student sampled {sampled:.0%}"
    source = "of the data" if sampled == 0 else source
    results = f"## Results\n\n{comparison(before, after)}\n\n{_measured(recipe, after)}\n\n" if after else ""
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n"
        f"# {recipe.name}\n\n"
        f"Distilled from {' and '.join(f'`{name}`' for name in teachers)} with potstill {potstill.__version__}, on "
        f"completions {source}. {origin}\n\n"
        f"{results}"
        "## Licence\n\nWeights that were distilled or copied from a model, or trained on data, may be bound by their "
        "licences. Whoever publishes these has to check:\n\n"
        f"{chr(10).join(licence_lines)}\n\n"
        f"## Recipe\n\n```yaml\n{yaml.safe_dump(recipe.source, sort_keys=False, allow_unicode=True)}```\n"
    )


def _measured(recipe: Recipe, after: dict[str, float]) -> str:
    return (
        f"Divergence and entropies are means over {after['eval_tokens']:,.0f} tokens that the student sampled at "
        f"temperature 1 for the prompts of `{recipe.data.heldout}`, exact over the whole vocabulary."
    )


def licence_of(model: str) -> str | None:
    """The licence that a model states: in its model card, or as a LICENSE file in its folder. None if neither."""
    if model == PACKAGED:
        return "apache-2.0"
    folder = Path(model)
    try:
        card = ModelCard.load(folder / "README.md" if folder.is_dir() else model)
    except Exception:  # no card, no network, no such page: all mean that nothing is known
        card = None
    if card is not None and card.data.license:
        return card.data.license
    return "other" if next(folder.glob("LICEN[CS]E*"), None) else None
