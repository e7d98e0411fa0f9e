"""Which JSON schemas xgrammar (0.2) holds to. Others it compiles as well, leaving out what a grammar can't say or what
it does not say yet, so that a text could break its own schema: those are refused here, by keyword.

A `$ref` may name the root or one of its `$defs` or `definitions`: these are checked, and xgrammar would follow it to
anywhere else in the schema as well, or take what lies outside of it for anything.

What it adds is fine, as such texts are valid all the same: no properties but those described, patterns matched whole
and without quotes, backslashes and control characters.
`oneOf` it takes for `anyOf`, so a text may fit several alternatives where these overlap. Of a `format` it knows the
grammar alone: 2023-02-30 is a `date`, and the parts of a `hostname` may have any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infer import regex

_NEVER = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip

# xgrammar reads the first of these that a schema has, and nothing beside it.
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties",
    ),
    "integer": _NUMBERS,
    "number": _NUMBERS,
}  # fmt: skip
# Without "type", these tell xgrammar what is meant.
_TELLING = {
    "array": ("items", "prefixItems", "unevaluatedItems"),
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
}
_PYTHON_TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "null": type(None), "array": list, "object": Mapping,
}  # fmt: skip
_CONSTRAINTS = ("type", *_DECIDING, *dict.fromkeys(word for words in _OF_TYPE.values() for word in words))

_DEFINITIONS = ("$defs", "definitions")
_FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
    "uri-template", "uuid", "json-pointer", "relative-json-pointer",
)  # fmt: skip

# Together xgrammar ignores one of the two.
_APART = (
    *((word, length) for word in ("pattern", "format") for length in ("minLength", "maxLength")),
    ("pattern", "format"),
    *(("multipleOf", bound) for bound in _NUMBERS[:-1]),
    *(("propertyNames", word) for word in ("properties", "patternProperties")),
    ("patternProperties", "additionalProperties"),
)


def check_supported(schema: Any) -> None:
    """ValueError naming the first keyword of a schema (parsed JSON) that would be ignored, and where it stands."""
    targets = _targets(schema)
    for path, one in _schemas(schema, ()):
        reason = _unsupported(one) or _bad_text(one)
        if isinstance(ref := one.get("$ref"), str) and ref not in targets:
            reason = f"$ref={ref!r} is not among the root's $defs or definitions: put it there, or write it in place"
        if path and "$id" in one:
            reason = "$id is not supported inside of a schema: leave it out"
        if reason:
            raise ValueError(f"structured_outputs.json: {'.'.join((*path, reason))}")


def _targets(root: Any) -> set[str]:
    """What a `$ref` may say: JSON pointers (RFC 6901) to schemas that are checked whoever refers to them.

    Names that a URI would have to escape with % are left out, as the escape of a slash could lead elsewhere.
    """
    found = {"#"}
    for word in _DEFINITIONS:
        if isinstance(root, Mapping) and isinstance(named := root.get(word), Mapping):
            found |= {f"#/{word}/{name.replace('~', '~0').replace('/', '~1')}" for name in named if "%" not in name}
    return found


def _schemas(schema: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The schema and all schemas inside of it; true and false say nothing that could be ignored."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for word in ("properties", "patternProperties", *_DEFINITIONS):
        if isinstance(named := schema.get(word), Mapping):
            for name, inner in named.items():
                yield from _schemas(inner, (*path, word, name))
    for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for number, inner in enumerate(_list(schema, word)):
            yield from _schemas(inner, (*path, word, str(number)))
    for word in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        yield from _schemas(schema.get(word), (*path, word))


def _unsupported(schema: Mapping[str, Any]) -> str | None:
    """The keyword that would be ignored, with what to do instead; None if there is none."""
    for word in _NEVER:
        if word in schema and schema[word] is not False:
            return f"{word} is not supported: leave it out"
    deciding = next((word for word in _DECIDING if word in schema), None)
    if deciding is not None:
        return _beside(schema, deciding)
    types = _types(schema)
    for word in _CONSTRAINTS[1:]:
        if word in schema and not any(name in types for name, words in _OF_TYPE.items() if word in words):
            return f"{word} needs a type that it speaks of beside it: add one"
    for one, other in _APART:
        if one in schema and schema.get(other, False) is not False:
            return f"{one} is not supported together with {other}: leave one out"
    if "multipleOf" in schema and "number" in types:
        return "multipleOf is supported for integers only: make it one, or leave multipleOf out"
    described = schema.get("properties")
    names = _list(schema, "required")
    if missing := [name for name in names if not isinstance(described, Mapping) or name not in described]:
        return f"required names {missing[0]!r}, which properties do not describe: add it there"
    return None


def _beside(schema: Mapping[str, Any], deciding: str) -> str | None:
    if deciding == "allOf" and len(_list(schema, "allOf")) > 1:
        return "allOf of several schemas is not supported: write them as one"
    allowed = [deciding]
    if deciding in ("const", "enum"):
        values = [schema["const"]] if deciding == "const" else _list(schema, "enum")
        if "type" in schema and all(any(_is_a(v, name) for name in _types(schema)) for v in values):
            allowed.append("type")
    for word in _CONSTRAINTS:
        if word in schema and word not in allowed:
            return f"{word} is not supported beside {deciding}: leave one out, or move it into the other"
    return None


def _bad_text(schema: Mapping[str, Any]) -> str | None:
    """As `_unsupported`, of formats and of expressions."""
    if "format" in schema and schema["format"] not in _FORMATS:
        return f"format={schema['format']!r} is not supported: it must be one of {', '.join(_FORMATS)}, or left out"
    named = schema.get("patternProperties")
    patterns = {f"patternProperties.{pattern}": pattern for pattern in named} if isinstance(named, Mapping) else {}
    if isinstance(pattern := schema.get("pattern"), str):
        patterns[f"pattern={pattern!r}"] = pattern
    for where, pattern in patterns.items():
        if reason := regex.unsupported_in_json(pattern):
            return f"{where}: {reason}"
    return None


def _list(schema: Mapping[str, Any], word: str) -> list[Any]:
    """What stands there if it is a list; xgrammar complains of anything else."""
    return value if isinstance(value := schema.get(word), list) else []


def _types(schema: Mapping[str, Any]) -> list[Any]:
    if "type" in schema:
        return _list(schema, "type") or [schema["type"]]
    return [name for name, words in _TELLING.items() if any(word in schema for word in words)][:1]


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return name in _PYTHON_TYPES and isinstance(value, _PYTHON_TYPES[name])
