"""A folder of what a teacher said: payload files (see payload.py), and an index of those that count.

    caches/arithmetic/index.json              what was captured, and each shard's name, size and checksum
    caches/arithmetic/shard-00000.parquet     ...

A shard counts once the index has it, and the index is replaced as a whole once a shard is on disk. So a process may be
killed at any moment: the next one finds whole shards and nothing else, and `CacheWriter.done` says where to go on.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from potstill.folders import only_one, replace_file
from potstill.teachers.payload import (
    PayloadError,
    PayloadInfo,
    Sample,
    check_sha256,
    open_payload,
    samples_of,
    write_payload,
)

INDEX = "index.json"
FORMAT = 1
LARGEST_INDEX = 1 << 26  # bytes
SHARD_ROWS = 1 << 16  # rows of the teacher in a shard, unless told otherwise


@dataclass(frozen=True)
class Shard:
    """A payload file of a cache.

    Attributes:
        file: its name within the cache's folder.
        samples: how many it holds.
        rows: of the teacher, over all samples.
        sha256: of the file, in hexadecimal.
    """

    file: str
    samples: int
    rows: int
    sha256: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*\.parquet", self.file, re.ASCII):
            raise PayloadError(f"{self.file!r} is no plain name of a .parquet file")
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise PayloadError(f"{self.sha256!r} is no SHA-256")
        if any(type(count) is not int or count < 0 for count in (self.samples, self.rows)):
            raise PayloadError(f"{self.file} has {self.samples} samples and {self.rows} rows")


def read_index(folder: Path) -> tuple[dict[str, Any], list[Shard]]:
    """What a cache says of itself, and its shards.

    Raises:
        PayloadError: the folder has no index, or it is no index of a cache.
        OSError: it cannot be opened.
    """
    path = folder / INDEX
    if folder.is_dir() and not path.exists():
        raise PayloadError(f"{folder} is no cache: it has no {INDEX}; make one with `potstill cache RECIPE`")
    if path.stat().st_size > LARGEST_INDEX:
        raise PayloadError(f"{path} has {path.stat().st_size:,} bytes; at most {LARGEST_INDEX:,} are read")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, about, listed = index["format"], index["about"], index["shards"]
        if version != FORMAT:
            raise PayloadError(f"{path} has format {version!r}; this version of potstill reads {FORMAT}")
        shards = [Shard(**shard) for shard in listed]
    except PayloadError as error:
        raise PayloadError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise PayloadError(f"{path} is no index of a cache") from None
    if not isinstance(about, dict) or len({shard.file for shard in shards}) < len(shards):
        raise PayloadError(f"{path} is no index of a cache")
    return about, shards


class CacheWriter:
    """Adds samples to a cache, shard by shard; a context manager, which alone writes the folder while it is open.

    Args:
        folder: of the cache; made where it is missing, continued where it is one.
        info: what all samples have in common.
        about: what else the cache is made from, as JSON has it: a cache of anything else is not continued.
        rows_per_shard: rows of the teacher, about, after which a shard is written.

    Raises (on entering):
        PayloadError: the folder is a cache of something else, or holds other files.
        OSError: it cannot be written, or another process writes it.
    """

    def __init__(self, folder: Path, info: PayloadInfo, about: Mapping[str, Any], *, rows_per_shard: int = SHARD_ROWS):
        self.folder = folder
        self.info = info
        self.about = json.loads(json.dumps({**asdict(info), **about}))
        self.rows_per_shard = rows_per_shard
        self.shards: list[Shard] = []
        self._open: list[Sample] = []
        self._lock = only_one(folder)

    def __enter__(self) -> "CacheWriter":
        self._lock.__enter__()
        try:
            if (self.folder / INDEX).exists():
                about, self.shards = read_index(self.folder)
                _check_same(self.folder, about, self.about)
            elif found := next(self.folder.iterdir(), None):
                raise PayloadError(f"{self.folder} holds {found.name} but no cache; choose another folder or empty it")
            else:
                self._write_index()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self.flush()
        finally:
            self._lock.__exit__(None, None, None)

    @property
    def done(self) -> int:
        """Samples on disk."""
        return sum(shard.samples for shard in self.shards)

    def add(self, sample: Sample) -> None:
        """Keep a sample, and write a shard if there are enough rows for one.

        Raises:
            PayloadError: a sample of the shard does not fit `info`.
            OSError: the shard cannot be written.
        """
        self._open.append(sample)
        if sum(len(kept.completion_ids) for kept in self._open) >= self.rows_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write the open shard, if it has samples."""
        samples, self._open = self._open, []  # what cannot be written is not tried again on leaving
        if not samples:
            return
        file = f"shard-{len(self.shards):05d}.parquet"  # one of that name which no index has was never finished
        sha256 = write_payload(self.folder / file, samples, self.info)
        rows = sum(len(sample.completion_ids) for sample in samples)
        self.shards.append(Shard(file, len(samples), rows, sha256))
        self._write_index()

    def _write_index(self) -> None:
        index = {"format": FORMAT, "about": self.about, "shards": [asdict(shard) for shard in self.shards]}
        replace_file(self.folder / INDEX, json.dumps(index, indent=1) + "\n")


def _check_same(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for key in (*ours, *theirs):
        if ours.get(key) != theirs.get(key):
            raise PayloadError(
                f"{folder} is a cache of another {key}: {theirs.get(key)!r}, and now it is {ours.get(key)!r}; choose "
                "another folder, or delete it"
            )


class CachedSamples(Sequence[Sample]):
    """A cache's samples in any order, one in memory at a time.

    Every file's checksum is compared at the start. The samples are then read from a memory-mapped copy, unpacked,
    which `datasets` keeps in its own cache: about 6 bytes for each of a row's ids.

    Args:
        folder: of the cache.

    Attributes:
        about: what the cache says of itself.
        info: what all samples have in common.

    Raises:
        PayloadError: it is no cache, has no samples, lacks a file, or has one that was changed or does not belong.
        OSError: something cannot be opened.
    """

    def __init__(self, folder: str | Path):
        import datasets

        self.folder = Path(folder)
        self.about, shards = read_index(self.folder)
        if not shards:
            raise PayloadError(f"{self.folder} is an empty cache; fill it with `potstill cache RECIPE --resume`")
        self.info, *others = [check_shard(self.folder, shard) for shard in shards]
        for shard, info in zip(shards[1:], others, strict=True):
            for key, value in asdict(info).items():
                if value != (first := asdict(self.info)[key]):
                    raise PayloadError(
                        f"{self.folder / shard.file} has {key} {value!r}, the first shard {first!r}: they are of two "
                        "captures"
                    )
        quiet = datasets.utils.logging.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            files = [str(self.folder / shard.file) for shard in shards]
            self._table: Any = datasets.Dataset.from_parquet(files).with_format("arrow")
        finally:
            if quiet:
                datasets.enable_progress_bars()

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        (sample,) = samples_of(self.folder, self._table[place : place + 1], self.info)
        return sample


def check_shard(folder: Path, shard: Shard) -> PayloadInfo:
    """What a shard says of its samples, once it was found whole.

    Raises:
        PayloadError: it is missing, was changed, or is no payload.
        OSError: it cannot be opened.
    """
    path = folder / shard.file
    if not path.is_file():
        raise PayloadError(f"{folder} lacks {shard.file}, which its {INDEX} has: copy it from where it was made")
    check_sha256(path, shard.sha256)
    file, info = open_payload(path)
    if file.metadata.num_rows != shard.samples:
        raise PayloadError(f"{path} has {file.metadata.num_rows} samples; {INDEX} says {shard.samples}")
    return info
