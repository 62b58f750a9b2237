"""Convert JSON to dataclasses, checking each value's type; errors name the field."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
type_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)  # slow: parses text


def convert_json(kind: Any, value: Any) -> Any:
    """Convert a JSON value to type ``kind``.

    Supports dataclasses, lists, tuples, dictionaries, unions, literals, ``Path``, ``str``,
    ``bool``, ``int``, ``None``, and ``float``, which may be given as an integer.

    Raises:
        TypeError: The value has another type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or (
        origin is Literal and any(value == a and type(value) is type(a) for a in args)
    ):
        return value
    if origin in (Union, UnionType):
        for each in args:
            with contextlib.suppress(TypeError):
                return convert_json(each, value)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return from_dict(kind, value)  # type: ignore[arg-type]
    if origin is dict and isinstance(value, Mapping):
        return {convert_json(args[0], k): convert_json(args[1], v) for k, v in value.items()}
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        kinds = [args[0]] * len(value) if origin is list or args[1:] == (...,) else list(args)
        if len(kinds) == len(value):
            return origin(convert_json(k, each) for k, each in zip(kinds, value, strict=True))
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind is float and (type(value) is float or (type(value) is int and abs(value) < 2**1023)):
        return float(value)
    if kind in (int, bool, str, type(None)) and type(value) is kind:
        return value
    raise TypeError(f"{value!r} is not {_name(kind)}")


def _name(kind: Any) -> str:
    if get_origin(kind) in (Literal, Union, UnionType):
        return " or ".join(_name(each) for each in get_args(kind) if each is not type(None))
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else repr(kind)


def from_dict(kind: type[T], data: Mapping[str, Any]) -> T:
    """Make a dataclass from a parsed JSON object.

    Raises:
        TypeError: A field is missing, unknown or of another type; the message names it.
    """
    hints, values = type_hints(kind), {}
    known = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name, value in data.items():
        if name not in known:
            raise TypeError(f"{name!r} is unknown; choose among {', '.join(known)}")
        try:
            values[name] = convert_json(hints[name], value)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
    return kind(**values)  # raises TypeError for missing fields
