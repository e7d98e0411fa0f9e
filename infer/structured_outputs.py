"""What form a text shall have: vLLM's `StructuredOutputsParams`, by name and by default.

Knows nothing of tokens. Whether a schema, a regular expression or a grammar means anything is `grammar`'s to say, which
needs a tokenizer for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of the first five fields is given. Once the text has that form whole, only EOS may follow.

    Raises:
        ValueError: a field has the wrong type, or none or several of the five are given.
    """

    _: KW_ONLY
    json: str | Mapping[str, Any] | None = None
    """The text is JSON that this schema describes. Properties come in the schema's order, no others are added."""
    regex: str | None = None
    """The whole text matches this regular expression, whose `.` matches ends of lines as well."""
    choice: Sequence[str] | None = None
    """The text is one of these. Stored as a tuple."""
    grammar: str | None = None
    """The text belongs to this grammar: GBNF, with `root ::= …`, or Lark, with `start: …`."""
    json_object: bool | None = None
    """True: the text is any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without optional whitespace: `, ` and `: ` separate, nothing else does."""

    # What vLLM has and HiSpec does not: the value below is the only one accepted.
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise ValueError(
                f"structured_outputs.json={self.json!r} must be a JSON schema as a mapping or as text; "
                f"of a pydantic model, its model_json_schema()"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"structured_outputs.{name}={getattr(self, name)!r} must be a string")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))  # this is still construction
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(f"structured_outputs.json_object={self.json_object!r} must be True, or left out")
        if not isinstance(self.disable_any_whitespace, bool):
            raise ValueError(
                f"structured_outputs.disable_any_whitespace={self.disable_any_whitespace!r} must be True or False"
            )
        if self.disable_any_whitespace and self.json is None and not self.json_object:
            raise ValueError(
                "structured_outputs.disable_any_whitespace speaks of JSON: give it with json or json_object"
            )
        for name in ("disable_additional_properties", "whitespace_pattern", "structural_tag"):
            if getattr(self, name):
                raise ValueError(
                    f"structured_outputs.{name}={getattr(self, name)!r} is not supported: leave it out, or say it in "
                    f"the schema, the regex or the grammar"
                )
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}"
            )

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)


def _choices(choice: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(choice, list | tuple) or not all(isinstance(text, str) for text in choice):
        raise ValueError(f"structured_outputs.choice={choice!r} must be a list of strings")
    if not choice:
        raise ValueError("structured_outputs.choice=[] leaves nothing to choose: list at least one text")
    return tuple(choice)
