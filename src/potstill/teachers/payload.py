"""Teacher rows on disk: one parquet file of samples, which any parquet reader opens without this library.

docs/teacher-payload.md has the columns. One line per sample: its tokens, and for each token of its completion the ids
that the teacher was asked about, ascending, with their log-probabilities and the exact rest. Nothing is stored for the
prompt. What all samples have in common is in the file's metadata as JSON, under b"potstill".
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from potstill import SampledTargets, TeacherTopK
from potstill.folders import sync_folder

FORMAT = 1
LARGEST_VOCAB = 1 << 20
LARGEST_GROUP = 1 << 30  # bytes that a row group may unpack to: a file that asks for more is not one of ours
GROUP_ROWS = 1 << 14  # rows of the teacher in a row group, about

CODES = 255  # log p = highest - spread * (code / 255)^2: off by less than spread / 255, by far less near the top
MOST_ROUNDING = 0.1  # nats that coding may change a row's total by; more is in the data


class PayloadError(ValueError):
    """A file that is no payload, not a whole one, or not the one that was expected."""


@dataclass(frozen=True)
class PayloadInfo:
    """What all samples of a payload have in common.

    Attributes:
        vocab_size: V; ids are below it. At most 2^20.
        tokenizer: fingerprint of the token -> id map (see `fingerprint`).
        teacher: the teacher's name.
        weight_version: which of its weights, where they change; any text.
        temperature: that the log-probabilities were taken at.
        top_k: the most ids that a row may have.
        chosen: how the ids were chosen: "top_k", "given", or a method of SampledTargets.from_logits.
        bits: 16 or 8 per log-probability: float16 below the row's highest, or a code of 255 steps. Sampled targets
            have float32 weights instead.
        eos_token_ids: tokens that end a completion, where they are known.
    """

    vocab_size: int
    tokenizer: str
    teacher: str
    top_k: int
    weight_version: str = ""
    temperature: float = 1.0
    chosen: str = "top_k"
    bits: int = 16
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))  # JSON has lists
        if any(type(x) is not int for x in (self.vocab_size, self.top_k, self.bits, *self.eos_token_ids)):
            raise PayloadError(f"vocab_size, top_k, bits and eos_token_ids are whole numbers; got {self}")
        if not 1 <= self.vocab_size <= LARGEST_VOCAB:
            raise PayloadError(f"vocab_size is {self.vocab_size}; expected 1 to {LARGEST_VOCAB:,}")
        if not 1 <= self.top_k <= self.vocab_size:
            raise PayloadError(f"top_k is {self.top_k}; expected 1 to the vocabulary's {self.vocab_size}")
        if self.bits not in (8, 16):
            raise PayloadError(f"bits is {self.bits}; expected 16 or 8")
        if not 0 < self.temperature < float("inf"):
            raise PayloadError(f"temperature is {self.temperature}; expected a finite number above 0")

    @property
    def sampled(self) -> bool:
        """Whether rows are weighted samples, and no log-probabilities."""
        return self.chosen not in ("top_k", "given")

    def schema(self) -> pa.Schema:
        """The columns, and these facts as metadata."""
        per_id, per_row = (lambda kind: pa.list_(pa.list_(kind))), (lambda kind: pa.list_(kind))
        columns = {
            "sample_id": pa.string(),
            "prompt_ids": per_row(pa.int32()),
            "completion_ids": per_row(pa.int32()),
            "token_ids": per_id(pa.int32()),
        }
        if self.sampled:
            columns["weights"] = per_id(pa.float32())
        elif self.bits == 16:
            columns |= {name: per_row(pa.float32()) for name in ("rest_log_prob", "highest")}
            columns["below_highest"] = per_id(pa.float16())
        else:
            columns |= {name: per_row(pa.float32()) for name in ("rest_log_prob", "highest", "spread")}
            columns["codes"] = per_id(pa.uint8())
        about = json.dumps({"format": FORMAT, **asdict(self)}).encode()
        return pa.schema(columns, metadata={b"potstill": about})


class Sample(NamedTuple):
    """A prompt, a completion of n tokens, and the teacher's n rows: row i predicts completion_ids[i]."""

    sample_id: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    rows: TeacherTopK | SampledTargets


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """A short text that is the same for two tokenizers exactly if every token has the same id in both."""
    ordered = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()[:16]


def write_payload(path: Path, samples: Sequence[Sample], info: PayloadInfo) -> str:
    """Write samples to a file, which appears under its name when it is whole.

    Args:
        path: of the parquet file; replaced if it exists.
        samples: their rows fit `info`; slots that are empty (-1, -inf or weight 0) are left out.
        info: what they have in common.

    Returns:
        The SHA-256 of the file.

    Raises:
        PayloadError: a sample whose rows are not those of its completion, or do not fit `info`.
    """
    schema = info.schema()
    nested = [name for name in schema.names if pa.types.is_list(schema.field(name).type) and name != "codes"]
    # Bytes of one place side by side: ids ascend, and numbers are alike, so that zstd finds their high bytes repeated.
    encoding = {_leaf(schema.field(name)): "BYTE_STREAM_SPLIT" for name in nested}
    partial = path.with_name(path.name + ".partial")
    writer = pq.ParquetWriter(
        partial,
        schema,
        compression="zstd",
        compression_level=9,
        use_dictionary=False,
        column_encoding=encoding,
        write_page_checksum=True,
    )
    with writer:
        for group in _groups(samples):
            writer.write_table(pa.table(_columns(group, info), schema=schema))
    with partial.open("rb") as file:
        digest = _sha256(file)
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)
    return digest


def read_info(path: Path) -> PayloadInfo:
    """What a file says of its samples; reads the footer alone.

    Raises:
        PayloadError: it is no payload, or of another format.
        OSError: it cannot be opened.
    """
    return open_payload(path)[1]


def read_payload(path: Path, sha256: str | None = None, *, validate: bool = True) -> Iterator[Sample]:
    """Yield the samples of a file, one row group in memory at a time.

    Args:
        path: of the parquet file.
        sha256: what the file must have, checked before anything is decoded.
        validate: refuse rows that no teacher can have said.

    Raises:
        PayloadError: the file is no payload, damaged or cut off, has another checksum, or holds rows that cannot be.
        OSError: it cannot be opened.
    """
    if sha256 is not None:
        check_sha256(path, sha256)
    file, info = open_payload(path)
    for group in range(file.num_row_groups):
        try:
            table = file.read_row_group(group)
        except (pa.ArrowException, OSError) as error:
            raise PayloadError(f"{path} is damaged in row group {group}: {error}") from None
        yield from samples_of(path, table, info, validate)


def check_sha256(path: Path, sha256: str) -> None:
    """Compare a file with the checksum that writing it gave.

    Raises:
        PayloadError: it has another one.
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        found = _sha256(file)
    if found != sha256:
        raise PayloadError(f"{path} is not the file that was written: its SHA-256 is {found}, expected {sha256}")


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _leaf(field: pa.Field) -> str:
    path, kind = field.name, field.type
    while pa.types.is_list(kind):
        path, kind = f"{path}.list.element", kind.value_type
    return path


def _groups(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if sum(len(x.completion_ids) for x in group) >= GROUP_ROWS:
            yield group
            group = []
    if group:
        yield group


def _columns(samples: list[Sample], info: PayloadInfo) -> dict[str, pa.Array]:
    ids, values, rests = zip(*(_checked(sample, info) for sample in samples), strict=True)
    lengths = np.array([len(sample.completion_ids) for sample in samples])
    live = torch.cat([x >= 0 for x in ids])  # [N, K]
    inner = np.concatenate([[0], live.sum(1).cumsum(0).numpy()])
    outer = np.concatenate([[0], lengths.cumsum()])

    def per_id(x: Tensor, kind: Any) -> pa.Array:
        flat = pa.array(x[live].numpy().astype(kind))
        return pa.ListArray.from_arrays(
            pa.array(outer, pa.int32()), pa.ListArray.from_arrays(pa.array(inner, pa.int32()), flat)
        )

    def per_row(x: Tensor) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(outer, pa.int32()), pa.array(x.numpy().astype(np.float32)))

    columns = {
        "sample_id": pa.array([sample.sample_id for sample in samples], pa.string()),
        "prompt_ids": pa.array([list(sample.prompt_ids) for sample in samples], pa.list_(pa.int32())),
        "completion_ids": pa.array([list(sample.completion_ids) for sample in samples], pa.list_(pa.int32())),
        "token_ids": per_id(torch.cat(ids), np.int32),
    }
    numbers = torch.cat(values)
    if info.sampled:
        return columns | {"weights": per_id(numbers, np.float32)}
    highest = numbers.masked_fill(~live, -torch.inf).amax(1).nan_to_num(neginf=0.0)
    columns |= {"rest_log_prob": per_row(torch.cat(rests)), "highest": per_row(highest)}
    below = highest[:, None] - numbers
    if info.bits == 16:
        return columns | {"below_highest": per_id(below, np.float16)}
    spread = below.masked_fill(~live, 0.0).amax(1)
    codes = ((below / spread.masked_fill(spread == 0, 1.0)[:, None]).clamp(0, 1).sqrt() * CODES).round()
    return columns | {"spread": per_row(spread), "codes": per_id(codes, np.uint8)}


def _checked(sample: Sample, info: PayloadInfo) -> tuple[Tensor, Tensor, Tensor]:
    """The sample's ids [n, K], ascending and -1 behind them, their log-probabilities or weights, and rests [n]."""
    rows, n = sample.rows, len(sample.completion_ids)
    name = f"sample {sample.sample_id!r}"
    if isinstance(rows, SampledTargets) != info.sampled:
        raise PayloadError(f"{name} has {type(rows).__name__} but the payload's ids are chosen by {info.chosen!r}")
    if rows.token_ids.shape[:-1] != (n,):
        raise PayloadError(
            f"{name} has {n} completion tokens but rows {list(rows.token_ids.shape[:-1])}; one row predicts each token"
        )
    if rows.temperature != info.temperature:
        raise PayloadError(f"{name} is at temperature {rows.temperature}, the payload at {info.temperature}")
    try:
        rows.validate(info.vocab_size)
    except ValueError as error:
        raise PayloadError(f"{name}: {error}") from None
    values = rows.weights if isinstance(rows, SampledTargets) else rows.log_probs
    empty = (rows.token_ids < 0) | (values == (0.0 if info.sampled else -torch.inf))
    ids, order = rows.token_ids.long().masked_fill(empty, info.vocab_size).sort(1)
    ids = ids.masked_fill(ids == info.vocab_size, -1)
    if ids.numel() and int((ids >= 0).sum(1).max()) > info.top_k:
        raise PayloadError(f"{name} has a row of more than top_k = {info.top_k} ids")
    rest = torch.zeros(n)
    if isinstance(rows, TeacherTopK):
        if rows.rest_log_prob is None:
            raise PayloadError(
                f"{name} has no rest_log_prob, which a rounded payload cannot give back; score it exactly"
            )
        rest = rows.rest_log_prob.float()
    width = info.top_k - ids.shape[1]
    ids, values = (torch.nn.functional.pad(x, (0, width), value=-1) for x in (ids, values.float().gather(1, order)))
    return ids[:, : info.top_k], values[:, : info.top_k], rest


def open_payload(path: Path) -> tuple[pq.ParquetFile, PayloadInfo]:
    """A file whose columns are a payload's, and what it says of its samples; reads the footer alone.

    Raises:
        PayloadError: it is no payload, or of another format.
        OSError: it cannot be opened.
    """
    path.open("rb").close()  # what follows raises OSError for broken content, too
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise PayloadError(f"{path} is no whole parquet file: {error}") from None
    schema = file.schema_arrow
    try:
        about = json.loads((schema.metadata or {})[b"potstill"])
        version = about.pop("format")
        if version != FORMAT:
            raise PayloadError(f"{path} has format {version}; this version of potstill reads {FORMAT}")
        info = PayloadInfo(**about)
    except PayloadError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError):
        raise PayloadError(
            f"{path} is a parquet file but no payload of potstill: its metadata do not say what it holds"
        ) from None
    if not schema.equals(info.schema()):
        raise PayloadError(f"{path} has other columns than its metadata say: {schema.names}")
    for group in range(file.num_row_groups):
        columns = file.metadata.row_group(group)
        size = sum(columns.column(i).total_uncompressed_size for i in range(columns.num_columns))
        if not 0 <= size <= LARGEST_GROUP:
            raise PayloadError(
                f"{path}: row group {group} would unpack to {size:,} bytes; at most {LARGEST_GROUP:,} are read"
            )
    return file, info


def samples_of(path: Path, table: pa.Table, info: PayloadInfo, validate: bool = True) -> Iterator[Sample]:
    """Yield the samples of a payload's table, each checked.

    Raises:
        PayloadError: one that cannot be, with its place in `path`.
    """
    table = table.combine_chunks()
    for index in range(table.num_rows):
        line = {name: table.column(name)[index] for name in table.column_names}
        if any(not value.is_valid for value in line.values()):
            raise PayloadError(f"{path}, sample {index}: a column is null")
        sample_id = line["sample_id"].as_py()
        try:
            sample = _sample(sample_id, line, info)
            yield sample._replace(rows=sample.rows.validate(info.vocab_size)) if validate else sample
        except (ValueError, pa.ArrowException) as error:
            raise PayloadError(f"{path}, sample {sample_id!r}: {error}") from None


def _sample(sample_id: str, line: Mapping[str, Any], info: PayloadInfo) -> Sample:
    prompt_ids, completion_ids = (line[name].values.to_numpy().tolist() for name in ("prompt_ids", "completion_ids"))
    n, inner = len(completion_ids), line["token_ids"].values
    counts = np.diff(inner.offsets.to_numpy())
    if len(inner) != n or inner.null_count or (n and counts.max(initial=0) > info.top_k):
        raise PayloadError(f"{n} completion tokens but {len(inner)} rows, of at most {info.top_k} ids")
    live = torch.from_numpy(np.arange(info.top_k) < counts[:, None])

    def per_id(name: str) -> Tensor:
        rows = line[name].values
        if not np.array_equal(np.diff(rows.offsets.to_numpy()), counts):
            raise PayloadError(f"{name} has other rows than token_ids")
        return torch.from_numpy(rows.flatten().to_numpy(zero_copy_only=False).copy())

    def per_row(name: str) -> Tensor:
        rows = torch.from_numpy(line[name].values.to_numpy(zero_copy_only=False).copy())
        if len(rows) != n:
            raise PayloadError(f"{name} has {len(rows)} numbers for {n} completion tokens")
        return rows

    def spread_out(x: Tensor, nothing: float) -> Tensor:
        return torch.full(live.shape, nothing, dtype=x.dtype).masked_scatter(live, x)

    ids = spread_out(per_id("token_ids").long(), -1)
    if bool(((ids[:, 1:] <= ids[:, :-1]) & live[:, 1:]).any()):
        raise PayloadError("token ids of a row are not ascending")
    if info.sampled:
        rows: TeacherTopK | SampledTargets = SampledTargets(ids, spread_out(per_id("weights"), 0.0), info.temperature)
    else:
        if info.bits == 16:
            below = spread_out(per_id("below_highest").float(), 0.0)
        else:
            below = per_row("spread")[:, None] * (spread_out(per_id("codes").float(), 0.0) / CODES).square()
        log_probs = (per_row("highest")[:, None] - below).masked_fill(~live, -torch.inf)
        rest = per_row("rest_log_prob")
        total = torch.logsumexp(torch.cat([log_probs, rest[:, None]], 1), 1, keepdim=True)
        # Ids and rest were all there is: what their sum is off by is rounding, and what they share of it goes.
        log_probs = torch.where(total.abs() < MOST_ROUNDING, log_probs - total, log_probs)
        rows = TeacherTopK(ids, log_probs, rest, info.temperature)
    for name, tokens in (("prompt_ids", prompt_ids), ("completion_ids", completion_ids)):
        if any(not 0 <= token < info.vocab_size for token in tokens):
            raise PayloadError(f"{name} has a token outside 0 to {info.vocab_size - 1}")
    return Sample(sample_id, prompt_ids, completion_ids, rows)
