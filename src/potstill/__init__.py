"""Distil a large language model into a small one, with losses that fit in memory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from potstill.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        # torch takes seconds to import, which `potstill --version` and a misspelt command should not.
        if not name.startswith("__") or name == "__all__":
            api = import_module("potstill.api")
            if hasattr(api, name):
                return globals().setdefault(name, getattr(api, name))
        raise AttributeError(f"module 'potstill' has no attribute {name!r}")
