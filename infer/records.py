"""Frozen dataclasses from JSON, read strictly: every field stands there, has its type and no other beside it.

`where` names the file in an error, `remedy` ends it. Knows no particular record.
"""

import json
import types
from collections import Counter
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MAX_JSON = 1 << 24  # characters of a record; the largest, hispec.json, has some hundred for each file
_MAX_DIGITS = 64


def _check_unique(names: list[str], where: str, remedy: str) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{where}: {twice[0]!r} stands twice; {remedy}")


def load_json(text: str, where: str, remedy: str) -> Any:
    """Parsed JSON; ValueError unless it is valid, finite and names no field twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_unique([key for key, _ in pairs], where, remedy)
        return dict(pairs)

    def no_number(text: str) -> float:
        raise ValueError(f"{where}: {text} is no JSON number; {remedy}")

    if len(text) > MAX_JSON:
        raise ValueError(f"{where}: {len(text)} characters, at most {MAX_JSON} are expected; {remedy}")
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_number, parse_int=_whole)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}); {remedy}") from error


def _whole(digits: str) -> int | float:
    """Python refuses to read very long integers, and no record has one: as a float it has the wrong type."""
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def read_record(kind: Any, value: Any, where: str, remedy: str) -> Any:
    """`value`, as JSON gave it, as the annotated type `kind`; ValueError names the field that is missing or wrong."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)  # defaults are for writers: in JSON every field stands
        if missing := sorted(hints.keys() - value.keys()):
            raise ValueError(f"{where}: field {missing[0]!r} is missing; {remedy}")
        if unknown := sorted(value.keys() - hints.keys()):
            raise ValueError(f"{where}: field {unknown[0]!r} is unknown; {remedy}")
        return kind(
            **{name: read_record(hints[name], item, f"{where}: {name}", remedy) for name, item in value.items()}
        )
    if origin in (Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        return None if value is None else read_record(rest[0], value, where, remedy)
    if origin is list and isinstance(value, list):
        return [read_record(args[0], item, f"{where}[{i}]", remedy) for i, item in enumerate(value)]
    if origin is tuple and isinstance(value, list) and len(value) == len(args):
        return tuple(read_record(arg, item, where, remedy) for arg, item in zip(args, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {key: read_record(args[1], item, f"{where}.{key}", remedy) for key, item in value.items()}
    if type(value) is kind or (origin is Literal and value in args):
        return value
    raise ValueError(f"{where}: got {value!r}, expected {getattr(kind, '__name__', kind)}; {remedy}")
