"""Writes docs/api.md from the docstrings and annotations of the public API: `make docs`. Sources are parsed, not run.

A field's text is the string below it, the comment behind it, or its entry in the class's section Args.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docstring_parser import DocstringStyle, parse

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """\
# API

Made from the docstrings by `make docs`; a test holds the two together. The command lines (`python -m infer`, `train`,
`export`) tell their options by `--help`.
"""
# (heading, module below which names can be imported, file, name; methods: whether they are part of it)
PUBLIC = (
    ("Inference", "infer", (
        ("infer/llm.py", "LLM", True),
        ("infer/async_llm.py", "AsyncLLM", True),
        ("infer/params.py", "SamplingParams", True),
        ("infer/structured_outputs.py", "StructuredOutputsParams", False),
        ("infer/output.py", "RequestOutput", True),
        ("infer/output.py", "CompletionOutput", True),
        ("infer/output.py", "Logprob", True),
        ("infer/output.py", "RequestMetrics", True),
        ("infer/output.py", "TierMetrics", True),
    )),
    ("Training", "train", (
        ("train/cli.py", "main", False),
        ("train/module.py", "EarlyExitModule", False),
        ("train/heads.py", "ExitConfig", False),
        ("train/losses.py", "ExitLoss", False),
        ("train/backbone.py", "Lora", False),
        ("train/layerskip.py", "LayerSkip", False),
        ("train/data.py", "DistillationDataModule", False),
    )),
    ("Export", "export", (
        ("export/cli.py", "main", False),
        ("export/writer.py", "ExportOptions", False),
        ("export/writer.py", "write_artifact", False),
    )),
)  # fmt: skip


def page() -> str:
    parts = [HEAD]
    for heading, package, members in PUBLIC:
        parts.append(f"\n## {heading}\n")
        exported = _exported(ROOT / package / "__init__.py")
        for file, name, has_methods in members:
            module = package if name in exported else file.removesuffix(".py").replace("/", ".")
            parts += _member(ROOT / file, name, module, has_methods)
    return "\n".join(parts) + "\n"


def _exported(file: Path) -> set[str]:
    """The names in __all__."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def _member(file: Path, name: str, module: str, has_methods: bool) -> Iterator[str]:
    source = file.read_text("utf-8")
    (node,) = (n for n in ast.parse(source).body if getattr(n, "name", None) == name)
    yield f"\n### `{module}.{name}`\n"
    if isinstance(node, ast.FunctionDef):
        yield from _function(node, name)
        return
    assert isinstance(node, ast.ClassDef)
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    (make,) = [n for n in methods if n.name == "__init__"] or [None]
    if make is not None:
        yield _signature(make, name)
        yield from _text(node)
    else:
        yield from _text(node, skipped={field for field, _ in _fields(node, source)})
        yield "".join(f"- {line}\n" for _, line in _fields(node, source))
    for one in methods if has_methods else ():
        if not one.name.startswith("_"):
            yield f"\n#### `{name}.{one.name}`\n"
            yield from _function(one, one.name)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
    is_property = any(getattr(d, "id", "") == "property" for d in node.decorator_list)
    if is_property:
        yield f"```\n{name}: {ast.unparse(node.returns) if node.returns else ''}\n```\n"
    else:
        yield _signature(node, name)
    yield from _text(node)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """As written, one parameter a line where they do not fit into one."""
    end = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    arguments = list(_arguments(node.args))
    line = f"{start}{name}({', '.join(arguments)}){end}"
    if len(line) > 100:
        line = f"{start}{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){end}"
    return f"```\n{line}\n```\n"


def _arguments(args: ast.arguments) -> Iterator[str]:
    missing: list[ast.expr | None] = [None] * (len(args.args) - len(args.defaults))
    for one, default in zip(args.args, [*missing, *args.defaults]):
        if one.arg != "self":
            yield _argument(one, default)
    if args.vararg is not None:
        yield f"*{ast.unparse(args.vararg)}"
    elif args.kwonlyargs:
        yield "*"
    for one, default in zip(args.kwonlyargs, args.kw_defaults):
        yield _argument(one, default)


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(one) + ("" if default is None else f" = {ast.unparse(default)}")


def _fields(node: ast.ClassDef, source: str) -> list[tuple[str, str]]:
    """(name, its line of text) of a dataclass's fields."""
    lines = source.splitlines()
    told = {p.arg_name: p.description for p in parse(ast.get_docstring(node) or "", DocstringStyle.GOOGLE).params}
    found = []
    for one, after in zip(node.body, [*node.body[1:], None]):
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name) or one.target.id.startswith("_"):
            continue
        text = told.get(one.target.id) or ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        elif "  # " in (last := lines[(one.end_lineno or one.lineno) - 1]):
            text = last.partition("  # ")[2]
        value = one.value
        if isinstance(value, ast.Call):  # field(default=…), or a record's own defaults
            value = next((k.value for k in value.keywords if k.arg == "default"), value)
        default = "" if value is None else f" = {ast.unparse(value)}"
        kind = f"`{one.target.id}: {ast.unparse(one.annotation)}{default}`"
        found.append((one.target.id, f"{kind}: {' '.join(text.split())}" if text else kind))
    return found


def _text(node: ast.AST, skipped: set[str] = frozenset()) -> Iterator[str]:  # type: ignore[assignment]
    """A docstring, its sections as lists; arguments in `skipped` are told elsewhere."""
    told = parse(ast.get_docstring(node) or "", DocstringStyle.GOOGLE)  # type: ignore[arg-type]
    short, long = told.short_description or "", told.long_description or ""
    between = "\n\n" if told.blank_after_short_description and long else "\n"
    if short:
        yield f"{short}{between}{long}".rstrip() + "\n"
    params = [p for p in told.params if p.arg_name not in skipped]
    if params:
        yield "".join(f"- `{p.arg_name}`: {' '.join((p.description or '').split())}\n" for p in params)
    if told.raises:
        yield "Raises:\n"
        yield "".join(f"- `{r.type_name}`: {' '.join((r.description or '').split())}\n" for r in told.raises)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
