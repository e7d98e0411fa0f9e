"""Which regular expressions xgrammar (0.2) holds to. From others it leaves out what it does not know, or takes it for
plain characters, with a warning alone: those are refused here.

The expressions are ECMA 262's, as JSON Schema wants them, and matched whole: so `^` says nothing where the text begins
anyway, nor `$` where it ends. `.` matches ends of lines as well.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|.)
        |\((?:\?(?::|<[A-Za-z_]\w*>)?)?  # "(?" alone opens anything but a group
        |.""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPES = frozenset("dDsSwWnrtfvxu")  # of letters and digits; what else is escaped stands for itself
# The characters that JSON escapes: quote, backslash and below U+0020
_NOT_IN_JSON = re.compile(r"""["\x00-\x1f]|\\["\\nrtfv]|\\(?:x|u00|u\{0*)(?:[01]?[0-9a-fA-F]|22|5[cC])\}?""")


def unsupported(expression: str) -> str | None:
    """What in the expression would be ignored or misread, with what to do instead; None if there is nothing."""
    depth, in_class, before = 0, False, "|"  # open groups; whether within […]; the last token
    for match in _TOKEN.finditer(expression):
        token = match[0]
        if token[0] == "\\":
            if token[1:2].isalnum() and token[1] not in _ESCAPES:
                return f"{token} is not supported: write the characters that it means"
        elif in_class:
            in_class = token != "]"
        elif token == "(?":
            return f"{expression[match.start() : match.start() + 4]} is not supported: write it without, or as (?:…)"
        elif token == "^" and (depth or before != "|"):
            return r"^ is supported at the beginning only: leave it out, or write \^ for the character"
        elif token == "$" and (depth or expression[match.end() : match.end() + 1] not in ("", "|")):
            return r"$ is supported at the end only: leave it out, or write \$ for the character"
        else:
            in_class = token == "["
            depth += (token[0] == "(") - (token == ")")
        before = token
    return None


def unsupported_in_json(expression: str) -> str | None:
    """As `unsupported`, of an expression for a string in JSON, where xgrammar escapes nothing: a character that needs
    it may only stand in a class with others, which leaves it out of the text.
    """
    members: list[bool] | None = None  # of an open class: whether it is such a character
    for token in _TOKEN.findall(expression):
        is_bad = _NOT_IN_JSON.fullmatch(token) is not None
        if members is None and token == "[":
            members = []
        elif members is not None and token != "]":
            members.append(is_bad)
        elif is_bad or (members and all(members)):
            return f"{token if members is None else '[…]'} would break the JSON around it: leave it out"
        else:
            members = None
    return unsupported(expression)
