"""YAML into dataclasses, strictly: no unknown key, no key twice, no value of another type.

YAML here means version 1.2. PyYAML reads 1.1, where `1e-4` is text and the `no` of `save_strategy: no` is false.
"""

import difflib
import re
import types
import typing
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar

import yaml

T = TypeVar("T")


class RecipeError(ValueError):
    """A mistake in a recipe or in what it names. The command line shows the message without a traceback."""


def parse_yaml(text: str) -> Any:
    """Parse YAML 1.2 with safe types only.

    Raises:
        RecipeError: for what is no YAML, and for a key given twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"not valid YAML: {error}") from None


def to_yaml(value: Any) -> str:
    """Write what parse_yaml reads as the same value, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def build(cls: type[T], values: dict[str, Any], prefix: str = "", **extra: Any) -> T:
    """Make the dataclass `cls` from a mapping, nested dataclasses included.

    Args:
        cls: a dataclass; fields whose names are in `extra` cannot be set by `values`.
        values: the mapping. A key without a value (None) means the default, as does a key left out.
        prefix: where the mapping stands, such as "student.", for the messages.
        extra: values for further fields.

    Raises:
        RecipeError: naming the key, its value, and the nearest known key or the expected type.
    """
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name not in extra}
    arguments = {}
    for key, value in values.items():
        check_known(key, hints, prefix)
        if value is None:
            continue
        options = (hints[key], *typing.get_args(hints[key]))
        if typing.get_origin(hints[key]) is dict and is_dataclass(options[-1]):
            arguments[key] = _build_each(options[-1], value, f"{prefix}{key}.")
            continue
        nested = next((part for part in options if is_dataclass(part)), None)
        if str in options and not isinstance(value, dict):  # a text that is short for the mapping
            nested = None
        expect(value, hints[key] if nested is None else dict, prefix + key)
        if nested is not None:
            value = build(nested, value, f"{prefix}{key}.")  # type: ignore[arg-type]
        elif type(value) is int and float in options:
            value = float(value)
        arguments[key] = value
    for spec in fields(cls):  # type: ignore[arg-type]
        if spec.name in hints and spec.name not in arguments and spec.default is spec.default_factory is MISSING:
            raise RecipeError(f"{prefix}{spec.name} is missing")
    return cls(**arguments, **extra)


def _build_each(cls: Any, values: Any, prefix: str) -> dict[str, Any]:
    """A mapping of names to dataclasses."""
    expect(values, dict, prefix.rstrip("."))
    for name, value in values.items():
        expect(name, str, f"a name under {prefix.rstrip('.')}")
        expect(value, dict, prefix + name)
    return {name: build(cls, value, f"{prefix}{name}.") for name, value in values.items()}


def check_known(key: Any, known: Collection[str], prefix: str) -> None:
    """Refuse a key that is not among the known ones, and name the nearest.

    Raises:
        RecipeError: the key is unknown.
    """
    if key not in known:
        raise RecipeError(f"unknown key {prefix}{key}; {nearest(key, known, prefix)}")


def nearest(word: Any, known: Collection[str], prefix: str = "") -> str:
    """The remedy for a misspelt word: the nearest known one, or all of them where none is near and they are few."""
    if near := difflib.get_close_matches(str(word), known, n=1):
        return f"did you mean {prefix}{near[0]}?"
    return f"known: {', '.join(known)}" if len(known) <= 20 else "nothing known has a similar name"


def expect(value: Any, hint: Any, where: str) -> None:
    """Refuse a value that does not match a type hint. An int is a float; a bool is no number.

    Raises:
        RecipeError: naming `where`, the value and the expected type.
    """
    if not _matches(value, hint):
        raise RecipeError(f"{where} is {value!r}; expected {_spell(hint)}")


def _matches(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, arguments[0]) for item in value)
    if hint is int or hint is float:
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


def _spell(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(option) for option in arguments if option is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is list:
        return f"a list of {_spell(arguments[0])}"
    if is_dataclass(hint):
        return "a mapping"
    return {dict: "a mapping", str: "text", bool: "true or false"}.get(origin or hint, hint.__name__)


class _Dumper(yaml.SafeDumper):
    """Puts texts in quotes that a reader of either version would take for something else, such as no or 1e-4."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"true|false", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)(e[-+]?[0-9]+)?|[-+]?[0-9]+e[-+]?[0-9]+|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$", re.I), list(_first))
