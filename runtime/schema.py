"""Turns decoded JSON or TOML into frozen dataclasses: unknown keys are refused by name, all faults reported together."""

import dataclasses
import types
import typing
from typing import Any, TypeVar

from runtime.errors import SchemaError

T = TypeVar("T")


def decode(cls: type[T], data: Any, where: str) -> T:
    """Builds `cls` (a dataclass) from `data`.

    Args:
        cls: The dataclass; fields may be scalars, Literals, Optionals, tuples, dicts and dataclasses.
        data: What json or tomllib returned.
        where: Name of the source, used in messages, e.g. "bundle/manifest.json".

    Raises:
        SchemaError: Lists every unknown key, missing key, wrong type and refused value, each with its path.
    """
    faults: list[str] = []
    value = _decode(cls, data, "", faults)
    if faults:
        raise SchemaError(f"{where}: " + "; ".join(faults))
    return typing.cast(T, value)


def encode(value: Any) -> Any:
    """The inverse of `decode`: dataclasses to dicts, tuples to lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def _decode(kind: Any, data: Any, path: str, faults: list[str]) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data, path, faults)
    if origin is typing.Literal:
        return _expect(data in arguments, data, path, "one of " + ", ".join(map(repr, arguments)), faults)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        inner = [a for a in arguments if a is not type(None)]
        chosen = next((a for a in inner if a is str and isinstance(data, str)), inner[-1])
        return _decode(chosen, data, path, faults)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            return _expect(False, data, path, "a list", faults)
        if arguments[-1] is not Ellipsis and len(arguments) != len(data):
            return _expect(False, data, path, f"a list of {len(arguments)}", faults)
        kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
        return tuple(
            _decode(k, item, f"{path}[{i}]", faults) for i, (k, item) in enumerate(zip(kinds, data, strict=True))
        )
    if origin is dict:
        if not isinstance(data, dict):
            return _expect(False, data, path, "a table", faults)
        return {key: _decode(arguments[1], item, f"{path}.{key}", faults) for key, item in data.items()}
    if kind is Any:
        return data
    if kind is float:
        return float(_expect(_is_number(data), data, path, "a number", faults) or 0)
    if kind is int:
        return _expect(_is_number(data) and isinstance(data, int), data, path, "a whole number", faults)
    return _expect(isinstance(data, kind), data, path, f"a {kind.__name__}", faults)


def _is_number(data: Any) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool)


def _expect(holds: bool, data: Any, path: str, expected: str, faults: list[str]) -> Any:
    if holds:
        return data
    faults.append(f"{path.lstrip('.') or 'top level'}: got {data!r}, expected {expected}")
    return None


def _decode_dataclass(cls: type, data: Any, path: str, faults: list[str]) -> Any:
    if not isinstance(data, dict):
        return _expect(False, data, path, "a table", faults)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    label = lambda name: f"{path}.{name}".lstrip(".")  # noqa: E731
    count_before = len(faults)
    faults += [f"unknown key {label(key)!r} (known: {', '.join(fields)})" for key in data if key not in fields]
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{path}.{name}", faults)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.append(f"missing key {label(name)!r}")
    if len(faults) > count_before:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # a dataclass refuses values in __post_init__
        faults.append(f"{path.lstrip('.') or 'top level'}: {error}")
        return None
