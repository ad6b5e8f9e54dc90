"""Stopping in the middle and going on: which checkpoint is whole, and what Ctrl-C and SIGTERM ask for.

Trainer writes a checkpoint's files one after the other and trainer_state.json last. Each of them shows by itself
whether it is whole: JSON parses, a torch file is a zip archive with its directory at the end, safetensors states its
length at the beginning. So no marker of our own is needed, and the checkpoints of a plain Trainer count as well.
"""

import json
import os
import re
import signal
import threading
import zipfile
from pathlib import Path
from types import FrameType
from typing import Any

NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders named checkpoint-N, whole or not, the latest step first."""
    found = [path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def newest_checkpoint(folder: Path, world_size: int = 1) -> Path | None:
    """The latest checkpoint that a run of so many processes can go on from; None if there is none."""
    return next((path for path in checkpoints_in(folder) if is_whole(path, world_size)), None)


def is_whole(checkpoint: Path, world_size: int = 1) -> bool:
    """Whether every file is there and none was cut short: weights, optimiser, scheduler, generators, JSON files."""
    ranks = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_bytes())
        for path in checkpoint.glob("*.json"):  # the configuration, too, is read when the weights are loaded
            json.loads(path.read_bytes())
        return (
            state["global_step"] == _step(checkpoint)
            and all(zipfile.is_zipfile(checkpoint / name) for name in ("optimizer.pt", "scheduler.pt", *ranks))
            and all(map(_is_whole_safetensors, {*_weight_files(checkpoint), *checkpoint.glob("*.safetensors")}))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _weight_files(checkpoint: Path) -> list[Path]:
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        return [checkpoint / name for name in set(json.loads(index.read_bytes())["weight_map"].values())]
    adapter = checkpoint / "adapter_model.safetensors"
    return [adapter if adapter.exists() else checkpoint / "model.safetensors"]


def _is_whole_safetensors(path: Path) -> bool:
    # Eight bytes give the header's length; the header's largest offset is where the last tensor ends.
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return False
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    ends = [tensor["data_offsets"][1] for tensor in header.values()]
    return path.stat().st_size == 8 + length + max(ends, default=0)


class StopRequest:
    """Within `with`, the first Ctrl-C or SIGTERM only sets `signum`; the next one acts as it always does.

    In another thread than the main one, where Python hands out no signals, nothing changes.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        while self.previous:
            signal.signal(*self.previous.popitem())

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.__exit__()
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\npotstill: finishing the step, then saving a checkpoint; once more to stop at once\n")
