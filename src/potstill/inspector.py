"""`potstill inspect`: what a teacher's rows look like, and what is wrong with them, in words.

Reads a cache, a payload file, or the skipped-step-*.pt of a run, sample by sample. What cannot be read is an error;
what can be read but not be right is a finding.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from potstill import SampledTargets, TeacherTopK
from potstill.teachers.cache import check_shard, read_index
from potstill.teachers.payload import (
    LARGEST_VOCAB,
    PayloadError,
    PayloadInfo,
    Sample,
    fingerprint,
    read_info,
    read_payload,
)
from potstill.train.models import located
from potstill.train.recipe import PACKAGED

UNIFORM_SPREAD = 1e-3  # nats between a row's ids, from the first to the last: no model is so undecided
UNIFORM_SHARE = 0.01
CUT_SHARE = 0.5  # of the completions
SHIFTED = 0.5  # nats that the tokens are likelier for if all rows are moved by one
FEW_HITS = 0.05  # of the tokens that were chosen are among the ids of their rows
ENOUGH = 50  # rows to judge by
FITTED_ROWS = 20_000  # rows, at most, that the temperature is judged by
SHOWN_TOKENS, SHOWN_IDS = 12, 3


@dataclass
class Figures:
    """Sums over samples and rows, from which `table` and `findings` are made."""

    samples: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    longest_prompt: int = 0
    longest_completion: int = 0
    ended: int = 0
    ids: int = 0
    mass: float = 0.0
    least_mass: float = math.inf
    heavy: int = 0
    entropy: float = 0.0
    effective: float = 0.0
    uniform: int = 0
    eos_mass: float = 0.0
    impossible: int = 0
    first_impossible: str = ""
    log_probs_at: Counter[int] = field(default_factory=Counter)  # of the tokens, with the rows moved by -1, 0, 1
    rows_at: Counter[int] = field(default_factory=Counter)
    hits: int = 0
    names: Counter[str] = field(default_factory=Counter)
    texts: Counter[int] = field(default_factory=Counter)
    fitted: list[tuple[Tensor, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What was found: lines to print, and whether any of them says that something is wrong."""

    lines: list[str]
    findings: list[str]


def inspect(path: str | Path, *, tokenizer: str | None = None, number: int = 0) -> Report:
    """Look at a cache, a payload file or a skipped step.

    Args:
        path: a folder with an index.json, a .parquet file, or a skipped-step-*.pt.
        tokenizer: that the rows should be about, and that shows them as text: a hub id, a folder, or
            `potstill:arithmetic`. None: the teacher's, where the rows name one that is on this machine.
        number: of the sample that is shown, from 0.

    Raises:
        PayloadError: nothing can be read from there, or there is no such sample or tokenizer.
        OSError: it cannot be opened.
    """
    infos, samples = _opened(Path(path))
    decoder = _tokenizer(tokenizer, infos[0])
    figures = Figures()
    shown: list[str] = []
    for at, sample in enumerate(samples):
        add(figures, sample, infos[0])
        if at == number:
            shown = sample_lines(sample, decoder)
    if not shown:
        raise PayloadError(f"{path} has {figures.samples} samples; there is no sample number {number}")
    findings = [*_of_infos(infos, decoder), *findings_of(figures, infos[0])]
    verdict = [f"WRONG: {finding}" for finding in findings] or ["nothing looks wrong"]
    return Report([*_table(figures, infos[0]), "", *shown, "", *verdict], findings)


def _tokenizer(name: str | None, info: PayloadInfo) -> PreTrainedTokenizerBase | None:
    if name is None and info.teacher != PACKAGED and not Path(info.teacher).is_dir():
        return None
    try:
        return AutoTokenizer.from_pretrained(**located(name or info.teacher))
    except (ValueError, OSError) as error:
        if name is None:
            return None
        raise PayloadError(f"--tokenizer {name}: {error}") from None


def _opened(path: Path) -> tuple[list[PayloadInfo], Iterator[Sample]]:
    if path.is_dir():
        _, shards = read_index(path)
        if not shards:
            raise PayloadError(f"{path} is an empty cache; fill it with `potstill cache RECIPE --resume`")
        infos = [check_shard(path, shard) for shard in shards]
        files = [path / shard.file for shard in shards]
        return infos, (sample for file in files for sample in read_payload(file, validate=False))
    if path.suffix == ".pt":
        return _skipped_step(path)
    return [read_info(path)], read_payload(path, validate=False)


def _skipped_step(path: Path) -> tuple[list[PayloadInfo], Iterator[Sample]]:
    """The micro-batches of a step that a trainer skipped."""
    try:
        batches = torch.load(path, weights_only=True, map_location="cpu")
        samples = [sample for i, batch in enumerate(batches) for sample in _samples_of(batch, f"{i}")]
    except (UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise PayloadError(f"{path} is no skipped step of a run with a top-k teacher: {error}") from None
    if not samples:
        raise PayloadError(f"{path} has no samples")
    rows = samples[0].rows
    chosen = "threshold" if isinstance(rows, SampledTargets) else "top_k"
    width = max(1, rows.token_ids.shape[-1])
    info = PayloadInfo(LARGEST_VOCAB, "", path.name, width, temperature=rows.temperature, chosen=chosen)
    return [info], iter(samples)


def _samples_of(batch: Mapping[str, Any], name: str) -> Iterator[Sample]:
    fields = {key: x for key, x in batch["teacher"].items() if x is not None}
    lengths = [len(completion) for completion in batch["completions"]]
    parts = {key: x.split(lengths) for key, x in fields.items() if isinstance(x, Tensor)}
    kind: Any = SampledTargets if "weights" in fields else TeacherTopK
    for i, completion in enumerate(batch["completions"]):
        length = int(batch["attention_mask"][i].sum()) - len(completion)
        rows = kind(**{**fields, **{key: part[i] for key, part in parts.items()}})
        yield Sample(f"{name}.{i}", batch["input_ids"][i, :length].tolist(), completion, rows)


def add(figures: Figures, sample: Sample, info: PayloadInfo) -> None:
    """Add a sample's share."""
    rows, tokens = sample.rows, sample.completion_ids
    figures.samples += 1
    figures.prompt_tokens += len(sample.prompt_ids)
    figures.longest_prompt = max(figures.longest_prompt, len(sample.prompt_ids))
    figures.longest_completion = max(figures.longest_completion, len(tokens))
    figures.ended += bool(tokens) and tokens[-1] in info.eos_token_ids
    figures.names[sample.sample_id] += 1
    figures.texts[hash((tuple(sample.prompt_ids), tuple(tokens)))] += 1
    try:
        rows.validate(info.vocab_size)
    except ValueError as error:
        figures.impossible += 1
        figures.first_impossible = figures.first_impossible or f"sample {sample.sample_id!r}: {error}"
    log_probs, rest = log_probs_of(rows)
    mass = log_probs.exp().sum(1)  # [n]
    log_probs, rest, mass, ids = (x[mass.isfinite()] for x in (log_probs, rest, mass, rows.token_ids))
    if not len(mass):
        return
    outcomes = torch.cat([log_probs, rest[:, None]], 1)  # [n, K + 1]
    entropy = -torch.xlogy(outcomes.exp(), outcomes.exp()).sum(1)
    highest, lowest = log_probs.amax(1), log_probs.masked_fill(ids < 0, math.inf).amin(1)
    figures.rows += len(mass)
    figures.ids += int((ids >= 0).sum())
    figures.mass += float(mass.sum())
    figures.least_mass = min(figures.least_mass, float(mass.min()))
    figures.heavy += int((mass > 1.001).sum())
    figures.entropy += float(entropy.sum())
    figures.effective += float(entropy.exp().sum())
    figures.uniform += int(((highest - lowest < UNIFORM_SPREAD) & ((ids >= 0).sum(1) > 1)).sum())
    ends = torch.isin(ids, torch.tensor(info.eos_token_ids, dtype=ids.dtype))
    figures.eos_mass += float((log_probs.exp() * ends).sum())
    if len(mass) == len(tokens):
        _add_tokens(figures, log_probs, rest, ids, torch.tensor(tokens))


def _add_tokens(figures: Figures, log_probs: Tensor, rest: Tensor, ids: Tensor, tokens: Tensor) -> None:
    """How likely the tokens were for the rows that should predict them, and for their neighbours."""
    n = len(tokens)
    for shift in (-1, 0, 1):  # row i holds what row i + shift should
        first, last = max(0, -shift), min(n, n - shift)
        if last <= first:
            continue
        hit = ids[first:last] == tokens[first + shift : last + shift, None]
        found = hit.any(1)
        # A token outside a row's ids is one of many: a guess of its share keeps the comparison finite.
        other = rest[first:last].clamp(min=-20) - math.log(1000)
        likely = torch.where(found, log_probs[first:last].masked_fill(~hit, 0.0).sum(1), other)
        figures.log_probs_at[shift] += likely.sum().item()  # type: ignore[assignment]
        figures.rows_at[shift] += len(likely)
        if shift == 0:
            figures.hits += int(found.sum())
            for row in found.nonzero()[: max(0, FITTED_ROWS - len(figures.fitted)), 0].tolist():
                figures.fitted.append((log_probs[row], int(hit[row].nonzero()[0])))


def log_probs_of(rows: TeacherTopK | SampledTargets) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, K] (-inf in empty slots) and rest [n] in float32; a sampled target's weights are those."""
    if isinstance(rows, SampledTargets):
        weights = rows.weights.float().masked_fill(rows.token_ids < 0, 0.0)
        return weights.log(), torch.full(weights.shape[:1], -math.inf)
    rows = rows.with_rest()
    assert rows.rest_log_prob is not None
    return rows.log_probs.float().masked_fill(rows.token_ids < 0, -math.inf), rows.rest_log_prob.float()


def _of_infos(infos: Sequence[PayloadInfo], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[str]:
    for key in asdict(infos[0]):
        values = sorted({repr(getattr(info, key)) for info in infos})
        if len(values) > 1:
            what = "mixed weight versions" if key == "weight_version" else f"shards differ in {key}"
            yield f"{what}: {', '.join(values)}; keep the shards of one capture"
    if tokenizer is not None and infos[0].tokenizer not in ("", ours := fingerprint(tokenizer.get_vocab())):
        yield (
            f"wrong tokenizer: the rows are about one with the fingerprint {infos[0].tokenizer}; that of "
            f"{tokenizer.name_or_path} is {ours}"
        )


def findings_of(figures: Figures, info: PayloadInfo) -> Iterator[str]:
    """What is wrong, in words."""
    rows = max(1, figures.rows)
    if figures.heavy:
        yield (
            f"mass > 1: {figures.heavy:,} of {figures.rows:,} rows have probabilities that sum to more than 1; "
            "are they logits, or of another temperature?"
        )
    if figures.impossible:
        yield f"impossible rows in {figures.impossible:,} samples, first {figures.first_impossible}"
    if not info.sampled and figures.uniform > UNIFORM_SHARE * figures.rows:
        yield (
            f"uniform rows: {figures.uniform / rows:.1%} have the same probability for all of their ids; a dead "
            "teacher, or one of random weights?"
        )
    repeated = [name for name, count in figures.names.items() if count > 1]
    if repeated:
        yield f"{len(repeated):,} sample ids come more than once, such as {repeated[0]!r}; was something copied?"
    if info.eos_token_ids and figures.ended < (1 - CUT_SHARE) * figures.samples:
        yield (
            f"truncated: {1 - figures.ended / figures.samples:.0%} of the completions stop without an end; raise "
            "rollout.max_new_tokens, or look at what the student writes"
        )
    if info.sampled or figures.rows_at[0] < ENOUGH:
        return
    means = {shift: figures.log_probs_at[shift] / count for shift, count in figures.rows_at.items() if count}
    best = max(means, key=lambda shift: means[shift])
    if best and means[best] > means[0] + SHIFTED:
        yield (
            f"shifted by one: the completions' tokens are likelier by {means[best] - means[0]:.1f} nats each if row i "
            f"is taken for row i {best:+d}"
        )
    elif figures.hits < FEW_HITS * figures.rows_at[0]:
        yield (
            "wrong tokenizer, or a text that the teacher would never write: "
            f"{1 - figures.hits / figures.rows_at[0]:.0%} of its tokens are not among the ids of their rows"
        )
    elif (finding := temperature_ignored(figures.fitted, info.temperature)) is not None:
        yield finding


def temperature_ignored(rows: Sequence[tuple[Tensor, int]], temperature: float) -> str | None:
    """Whether rows that should be softened are as sharp as the text.

    Let tokens be drawn from softmax(z) and rows be softmax(z / T): then the power of the rows that makes the tokens
    most likely is T. It is 1 where T was ignored.
    """
    if temperature == 1 or len(rows) < ENOUGH:
        return None
    log_probs = torch.stack([row for row, _ in rows]).double()
    chosen = torch.tensor([slot for _, slot in rows])
    live = log_probs.masked_fill(log_probs == -math.inf, 0.0)
    power = torch.tensor(1.0, dtype=torch.float64)
    information = power
    for _ in range(50):  # Newton's method on a concave function
        weights = torch.softmax(power * log_probs, 1)
        mean = (weights * live).sum(1)
        slope = (live.gather(1, chosen[:, None])[:, 0] - mean).sum()
        information = ((weights * live.square()).sum(1) - mean.square()).sum().clamp(min=1e-9)
        power = (power + (slope / information).clamp(-0.5, 0.5)).clamp(0.01, 100)
    error = information.rsqrt()
    if abs(power - 1) < 3 * error + 0.1 * abs(temperature - 1) and abs(power - temperature) > 4 * error:
        return (
            f"temperature ignored: rows of temperature {temperature:g} should be {temperature:g} times as flat as the "
            f"text that they are about, and are {power:.2f} ± {1.96 * error:.2f} times"
        )
    return None


def _table(figures: Figures, info: PayloadInfo) -> list[str]:
    rows, samples = max(1, figures.rows), max(1, figures.samples)
    doubles = sum(count - 1 for count in figures.texts.values())
    facts = {
        "teacher": f"{info.teacher} {info.weight_version}".strip(),
        "rows": f"{info.chosen}, K = {info.top_k}, temperature {info.temperature:g}, {info.bits} bits",
        "samples": f"{figures.samples:,}, of which {doubles:,} repeat another's prompt and completion",
        "scored tokens": f"{figures.rows:,}",
        "prompt length": f"{figures.prompt_tokens / samples:.1f} tokens on average, at most {figures.longest_prompt}",
        "completion length": f"{figures.rows / samples:.1f} tokens on average, at most {figures.longest_completion}",
        "completions with an end": f"{figures.ended / samples:.1%}" if info.eos_token_ids else "unknown",
        "ids in a row": f"{figures.ids / rows:.1f}",
        "mass of the ids": f"{figures.mass / rows:.4f} on average, at least {figures.least_mass:.4f}",
        "entropy": f"{figures.entropy / rows:.3f} nats, all other tokens as one",
        "effective K": f"{figures.effective / rows:.1f}",
        "mass of EOS": f"{figures.eos_mass / rows:.4f}" if info.eos_token_ids else "unknown",
        "tokens among their ids": f"{figures.hits / max(1, figures.rows_at[0]):.1%}",
        "impossible rows": f"in {figures.impossible:,} samples",
    }
    width = max(map(len, facts))
    return [f"{name:{width}}  {value}" for name, value in facts.items()]


def sample_lines(sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """A sample for the eye: its prompt, and at each token what the teacher held most likely."""

    def text(ids: Sequence[int]) -> str:
        # What a model wrote may hold anything, also what a terminal would obey.
        return ascii(tokenizer.decode(list(ids))) if tokenizer else " ".join(map(str, ids))

    log_probs, rest = log_probs_of(sample.rows)
    lines = [f"sample {sample.sample_id!a}", f"prompt: {text(sample.prompt_ids)}", "completion, and the teacher:"]
    for i, token in enumerate(sample.completion_ids[:SHOWN_TOKENS]):
        best = log_probs[i].nan_to_num(-math.inf).topk(min(SHOWN_IDS, log_probs.shape[1]))
        guesses = [
            f"{text([int(sample.rows.token_ids[i, slot])])} {log_prob.exp():.3f}"
            for log_prob, slot in zip(*best, strict=True)
        ]
        lines.append(f"  {text([token]):12} | {'  '.join(guesses)}  other {rest[i].exp():.3f}")
    left = len(sample.completion_ids) - SHOWN_TOKENS
    return lines + ([f"  and {left} more"] if left > 0 else [])
