"""Folders that a command writes: for one process at a time, and whole files only."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class FolderInUseError(OSError):
    """Another process is writing the folder."""


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a folder, made where it is missing, against all others that ask in the same way.

    The hold ends with the process, however that ends. On file systems without locks there is none.

    Raises:
        FolderInUseError: another process holds it.
        OSError: it cannot be made or opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUseError(
                f"another process is writing {folder}; wait until it has ended, or choose another folder"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Give a file a new text: whoever reads it, at any time and after any crash, finds the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
