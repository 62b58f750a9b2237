"""JSON into dataclasses: every value of its field's type, or an error that names the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def typed(kind: Any, value: Any) -> Any:
    """Return what JSON has for a value of type ``kind``.

    Knows dataclasses, lists, tuples, dictionaries, unions, literals, ``Path``, ``str``, ``bool``,
    ``int``, ``None``, and ``float``, which may be a whole number.

    Raises:
        TypeError: The value is of another type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _first(args, value)
    if origin is Literal:
        return value if value in args and type(value) in map(type, args) else _refuse(args, value)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return from_dict(kind, value)  # type: ignore[arg-type]
    if origin is dict and isinstance(value, Mapping):
        return {typed(args[0], key): typed(args[1], each) for key, each in value.items()}
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        kinds = [args[0]] * len(value) if origin is list or args[1:] == (...,) else list(args)
        if len(kinds) != len(value):
            _refuse(kind, value)
        return origin(typed(k, each) for k, each in zip(kinds, value, strict=True))
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    simple = (int, bool, str, type(None))
    return value if kind in simple and type(value) is kind else _refuse(kind, value)


def _first(kinds: tuple[Any, ...], value: Any) -> Any:
    """Return the value as the first type that fits."""
    for kind in kinds:
        try:
            return typed(kind, value)
        except TypeError:
            continue
    return _refuse(kinds, value)


def _refuse(kind: Any, value: Any) -> Any:
    raise TypeError(f"{value!r} is not {_name(kind)}")


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        kind = get_args(kind)
    if isinstance(kind, tuple):
        return " or ".join(_name(each) for each in kind if each is not type(None))
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else repr(kind)


def from_dict(kind: type[T], data: Mapping[str, Any]) -> T:
    """Make a dataclass from a dictionary that JSON has read.

    Raises:
        TypeError: A field is missing, unknown or of another type; the message names it.
    """
    hints = get_type_hints(kind)
    known = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    if unknown := sorted(data.keys() - {field.name for field in known}):
        raise TypeError(f"{unknown[0]!r} is unknown; known are {', '.join(f.name for f in known)}")
    values = {}
    for field in known:
        if field.name not in data:
            continue  # the default; without one, the constructor says that it is missing
        try:
            values[field.name] = typed(hints[field.name], data[field.name])
        except TypeError as error:
            raise TypeError(f"{field.name}: {error}") from None
    return kind(**values)
