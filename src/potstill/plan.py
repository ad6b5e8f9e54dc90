"""`potstill plan`: the peak memory of the loss, by formula, for every strategy; what fits and what to choose.

The formulas give the bytes that the tensors of one forward and backward hold at their peak, as `potstill bench memory`
measures them: logits (or hidden states and the head's weight), their gradients and every temporary. Not modelled: the
rest of the model, the teacher's payload (12 K bytes a token), the buffers of collectives, and what a GPU's allocator
rounds up or fragments. bfloat16, the default divergence and tail, the eager kernel, no softcap.

Notation: N tokens, V ids on this rank, H the hidden size, K ids in a teacher's row.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from potstill.bench.report import table
from potstill.core.single_pass import MOST_PIECES, WEIGHT_BLOCK
from potstill.core.tiles import Budget, budget, chunk_bounds, rows_within

GIB = 2**30
GPU = budget(torch.device("cuda"))
SEED_CHUNK = 4_096  # rows, the default of verl's chunked path
TP = (1, 2, 4, 8, 16, 32, 64)
CHUNK_SIZES = (None, 512, 256, 128)  # tried in this order; below, GEMMs are too flat to be worth it


class Job(NamedTuple):
    """One call of the loss: tokens N, ids V, hidden size H, ids K of the teacher, chunk_size and the byte budgets."""

    tokens: int
    vocab_size: int
    hidden_size: int
    top_k: int
    chunk_size: int | None = None
    budget: Budget = GPU
    most_pieces: int | None = None  # how many pieces of rows single_pass may take

    def rank_of(self, tp: int) -> "Job":
        """The same with the vocabulary cut over tp ranks."""
        return self._replace(vocab_size=-(-self.vocab_size // tp), most_pieces=MOST_PIECES if tp > 1 else None)

    @property
    def logits(self) -> int:
        """Bytes of [N, V] in bfloat16."""
        return 2 * self.tokens * self.vocab_size

    @property
    def product_rows(self) -> int:
        """Rows of one product hidden @ weight.T."""
        return min(self.tokens, rows_within(self.budget.product, self.vocab_size, 2, self.chunk_size))

    def tile(self, rows: int, width: int) -> int:
        """Bytes of the float32 tile that cuts [rows, width], and of the columns of its ids."""
        rows = min(rows, rows_within(self.budget.tile, width, 4, self.chunk_size))
        return 4 * rows * (width + 1) + 25 * rows * self.top_k

    def per_id(self, n_bytes: int, rows: int | None = None) -> int:
        """Bytes of what holds n_bytes for each id of the teacher (and one more) in each row."""
        return n_bytes * (self.tokens if rows is None else rows) * (self.top_k + 1)


IDS, VALUES, GRADIENT, SCORE = 8, 4, 4, 42
"""Bytes per id: the cleaned payload, a gradient, and the arithmetic of the loss on K + 1 numbers at its peak."""


def verl_like(job: Job) -> int:
    """7 L: logits 1, float32 shifted 2, exp 2, log-probabilities 2; and what top k gives."""
    return 7 * job.logits + job.per_id(16)


def seed_chunked(job: Job) -> int:
    """Forward 1 + 6c/N, then backward 3 + 4c/N while a full float32 gradient fills, then its cast 4, in L."""
    chunk = 2 * min(SEED_CHUNK, job.tokens) * job.vocab_size
    return max(job.logits + 6 * chunk + job.per_id(12), 3 * job.logits + 4 * chunk, 4 * job.logits) + job.per_id(8)


def logits_kept(job: Job) -> int:
    """Logits, their gradient, a tile."""
    tile = job.tile(job.tokens, job.vocab_size)
    return max(2 * job.logits + tile + job.per_id(IDS + GRADIENT), job.logits + job.per_id(IDS + VALUES + SCORE))


def logits_reused(job: Job) -> int:
    """Logits, which become their gradient, and a tile."""
    tile = job.tile(job.tokens, job.vocab_size)
    return job.logits + max(tile + job.per_id(IDS + VALUES + GRADIENT), job.per_id(IDS + VALUES + SCORE))


def single_pass(job: Job) -> int:
    """Head, its float32 gradient, hidden states and theirs, one product, and what a piece of rows needs besides."""
    width, hidden = job.vocab_size, job.hidden_size
    rows = max(job.product_rows, -(-job.tokens // (job.most_pieces or job.tokens)))
    rows = chunk_bounds(job.tokens, rows)[0][1]
    block = chunk_bounds(width, WEIGHT_BLOCK)[0][1]
    piece = max(
        job.tile(rows, width) + job.per_id(2 * GRADIENT, rows),
        job.per_id(SCORE, rows),
        2 * block * hidden + 2 * rows * hidden + job.per_id(GRADIENT, rows),
    )
    kept = 6 * width * hidden + 4 * job.tokens * hidden + job.per_id(IDS + VALUES + 4)
    return kept + 2 * rows * width + piece


def recompute(job: Job) -> int:
    """Head and its gradient, hidden states four times over, one product over all rows, a tile; or the loss itself."""
    n, width, hidden = job.tokens, job.vocab_size, job.hidden_size
    columns = min(width, max(1, job.product_rows * width // n))
    backward = (
        4 * width * hidden
        + 8 * n * hidden
        + 2 * n * columns
        + max(job.tile(n, chunk_bounds(width, columns)[0][1]), 2 * n * hidden)
        + job.per_id(IDS + GRADIENT)
    )
    loss = 2 * width * hidden + 2 * n * hidden + job.per_id(IDS + VALUES + SCORE)
    return max(backward, loss)


STRATEGIES: dict[str, Callable[[Job], int]] = {
    "fused, single_pass": single_pass,
    "fused, recompute": recompute,
    "logits reused": logits_reused,
    "logits kept": logits_kept,
    "the seed's chunked path": seed_chunked,
    "verl-like": verl_like,
}


class Choice(NamedTuple):
    """What to pass to the loss: a strategy of this library, its chunk_size, and the peak it has."""

    strategy: str
    chunk_size: int | None
    peak: int


def recommend(job: Job, tp: int, limit: float | None = None) -> Choice | None:
    """The fastest fused strategy within `limit` bytes, in the largest chunks that fit; None where none fits.

    Without a limit it is what memory="auto" means: single_pass (three GEMMs) on one rank while the float32 gradient
    of the head is small, else recompute (four GEMMs). With small chunks single_pass would spend its time on adding
    to that gradient, so both are tried before chunks shrink. `job` has the whole vocabulary.
    """
    small = 6 * job.vocab_size * job.hidden_size <= job.budget.weight_gradient
    strategies = ["fused, recompute"]
    if tp == 1 and (small or limit is not None):
        strategies.insert(0, "fused, single_pass")
    for chunk_size in CHUNK_SIZES:
        for strategy in strategies:
            peak = STRATEGIES[strategy](job.rank_of(tp)._replace(chunk_size=chunk_size))
            if limit is None or peak <= limit:
                return Choice(strategy, chunk_size, peak)
    return None


def least_tp(strategy: str, job: Job, limit: float) -> int | None:
    """The least degree of tensor parallelism, a power of two up to 64, whose ranks stay within `limit` bytes."""
    return next((tp for tp in TP if STRATEGIES[strategy](job.rank_of(tp)) <= limit), None)


def most_tokens(strategy: str, job: Job, limit: float) -> int:
    """The largest number of tokens that stays within `limit` bytes, everything else as in `job`."""
    fits = lambda n: STRATEGIES[strategy](job._replace(tokens=n)) <= limit  # noqa: E731
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sizes_of(model: str) -> tuple[int, int]:
    """Vocabulary and hidden size of a model: a config.json, a folder that has one, or an id on the hub.

    Raises:
        ValueError: where there is none, or it does not say them.
    """
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
    else:
        try:
            from transformers import PretrainedConfig

            config, _ = PretrainedConfig.get_config_dict(model)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--model {model} is no file, and looking on the hub needs: pip install 'potstill[train]'"
            ) from error
        except OSError as error:
            raise ValueError(
                f"--model {model} is neither a config.json, nor a folder with one, nor a known id"
            ) from error
    config = config.get("text_config", config)
    hidden = next((config[name] for name in ("hidden_size", "n_embd", "d_model") if name in config), None)
    if hidden is None or "vocab_size" not in config:
        raise ValueError(f"--model {model}: its config has no vocab_size or hidden_size; give --vocab and --hidden")
    return config["vocab_size"], hidden


def report(job: Job, tp: int = 1, budget_gib: float | None = None) -> str:
    """The table of strategies, what is counted in it, and what to choose; `job` has the whole vocabulary.

    Raises:
        ValueError: for sizes that are not positive.
    """
    sizes = {"tokens": job.tokens, "vocab": job.vocab_size, "hidden": job.hidden_size, "top-k": job.top_k}
    for name, value in {**sizes, "tp": tp, "budget": budget_gib}.items():
        if value is not None and value <= 0:
            raise ValueError(f"--{name} must be > 0, got {value}")
    rank, limit = job.rank_of(tp), None if budget_gib is None else budget_gib * GIB
    rows = []
    for name, strategy in STRATEGIES.items():
        row = {"strategy": name, "peak, GiB": f"{strategy(rank) / GIB:.2f}"}
        if limit is not None:
            row[f"fits {budget_gib:g} GiB"] = "yes" if strategy(rank) <= limit else "no"
            row["least tp"] = str(least_tp(name, job, limit) or f"> {TP[-1]}")
            row["most tokens"] = f"{most_tokens(name, rank, limit):,}"
        rows.append(row)
    where = "" if tp == 1 else f"\nThe figures are those of one rank of {tp}, with {rank.vocab_size:,} ids."
    return f"""\
One forward and backward of the loss on {job.tokens:,} tokens: {job.vocab_size:,} ids, hidden size {job.hidden_size:,},
top {job.top_k}, bfloat16.{where}

{table(rows)}

Counted: logits, or hidden states and head; their gradients; temporaries. With logits, the head and its gradient are in
the model besides. Not counted: the rest of the model, the teacher's payload, the buffers of collectives, and what a
GPU's allocator rounds up or fragments.

{_advice(job, tp, limit)}"""


def _advice(job: Job, tp: int, limit: float | None) -> str:
    choice = recommend(job, tp, limit)
    if choice is None:
        assert limit is not None
        ranks, tokens = (
            least_tp("fused, recompute", job, limit),
            most_tokens("fused, recompute", job.rank_of(tp), limit),
        )
        remedies = [f"--tp {ranks}"] * bool(ranks) + [f"--tokens {tokens}"] * bool(tokens)
        return "Nothing fits; it would with " + (" or ".join(remedies) or "a larger budget") + "."
    rows = job.rank_of(tp)._replace(chunk_size=choice.chunk_size).product_rows
    memory = choice.strategy.removeprefix("fused, ")
    return (
        f'Recommended: LinearLogits(hidden, weight), memory="{memory}", chunk_size={choice.chunk_size}'
        f" (products of up to {rows:,} rows): {choice.peak / GIB:.2f} GiB."
    )
