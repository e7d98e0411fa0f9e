"""`--help` of the commands whose options LightningCLI parses, read from the sources and not from the running classes.

To ask LightningCLI itself, torch, Lightning and transformers must be imported first, which takes many seconds. The
names, types, defaults and texts that it would print stand in the same files: ours, and those of the Lightning that is
installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docstring_parser import DocstringStyle, ParseError, parse

from train.lightning_cli import GPU_TFLOPS

_OURS = Path(__file__).parent

WHAT = {
    "estimate": "What fit would need: memory, disk, time.",
    "lint": "Look at the training text as fit would read it.",
    "fit": "Train the exits.",
    "validate": "Loss, acceptance and predicted speed-up of every exit on held-out text.",
    "test": "The same as validate, logged as test/….",
    "promise": "Write validation.json into the heads/ of model.warm_start.",
}
_EPILOG = """\
Every option is a key of the config, and holds against it. What an object of a class takes (a strategy, a logger, a
callback) is told by, for example, --trainer.strategy.help ModelParallelStrategy.
"""
# What only validation and test take, of Trainer's methods; the rest is given by LightningCLI itself
_GIVEN = ("self", "model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule")


class Option(NamedTuple):
    name: str
    type: str
    default: str | None  # None: it must be given
    text: str

    @property
    def described(self) -> str:
        end = "(required)" if self.default is None else f"(default: {self.default})"
        return f"{self.text} {end}".strip()


def help_text(command: str) -> str:
    """Of one of the commands in WHAT."""
    trainer = _lightning() / "pytorch" / "trainer" / "trainer.py"
    parser = argparse.ArgumentParser(
        prog=f"python -m train {command}",
        usage=f"python -m train {command} --config FILE [options]",
        description=WHAT[command],
        epilog="\n".join([*_keys(), _EPILOG]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML of these options, e.g. configs/smollm2-135m.yaml")
    parser.add_argument("--print_config", action="store_true", help="show the whole config that results, and stop")
    parser.add_argument("--seed_everything", metavar="int | bool", help="seed of all generators (default: 0)")
    if command == "estimate":
        parser.add_argument("--tflops", metavar="float", help=f"10¹² operations a second (default: {GPU_TFLOPS:g})")
    _add(parser, "", read_options(trainer, "Trainer", command if command in ("validate", "test") else "fit"))
    exits = parser.add_argument_group("the exits and how they are trained")
    _add(exits, "model.", read_options(_OURS / "module.py", "EarlyExitModule"))
    text = parser.add_argument_group("the text")
    linked = ("base", "revision")  # to model.base and model.revision
    _add(text, "data.", [o for o in read_options(_OURS / "data.py", "DistillationDataModule") if o.name not in linked])
    _add(parser.add_argument_group("Lightning's Trainer"), "trainer.", read_options(trainer, "Trainer"))
    return parser.format_help()


def _keys() -> Iterator[str]:
    """Of the sections within `model`, as they stand in a config."""
    for title, file, owner in (
        ("each entry of model.exits", "heads.py", "ExitConfig"),
        ("loss, of such an entry", "losses.py", "ExitLoss"),
        ("model.lora", "backbone.py", "Lora"),
        ("model.layerskip", "layerskip.py", "LayerSkip"),
    ):
        yield f"keys of {title}:"
        for one in read_options(_OURS / file, owner):
            head = f"  {one.name}: {one.type}"
            yield textwrap.fill(f"{head:<23} {one.described}", width=100, subsequent_indent=" " * 24)
        yield ""


def _add(parser: argparse._ActionsContainer, prefix: str, options: list[Option]) -> None:
    for one in options:
        parser.add_argument(f"--{prefix}{one.name}", metavar=one.type, help=one.described.replace("%", "%%"))


def read_options(file: Path, owner: str, method: str = "__init__") -> list[Option]:
    """What a class's method takes; of a dataclass, which has no such method in its source, its fields.

    Args:
        file: the source. It is parsed, not run.
        method: its docstring, or else the class's, has the section Args.
    """
    (found,) = (n for n in ast.parse(file.read_text("utf-8")).body if isinstance(n, ast.ClassDef) and n.name == owner)
    methods = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == method]
    documented: list[ast.FunctionDef | ast.ClassDef] = [*methods, found]
    texts = {name: text for node in documented for name, text in _texts(ast.get_docstring(node) or "")}
    return [
        Option(name, kind, default, " ".join(texts.get(name, "").split()))
        for name, kind, default in (_parameters(methods[0].args) if methods else _fields(found))
        if name not in _GIVEN
    ]


def _texts(docstring: str) -> Iterator[tuple[str, str]]:
    """(name, what its section Args says of it)."""
    try:
        found = parse(docstring, DocstringStyle.GOOGLE).params
    except ParseError:  # of a Lightning to come: an option without its text is better than no help
        return
    yield from ((one.arg_name, one.description or "") for one in found)


def _parameters(args: ast.arguments) -> Iterator[tuple[str, str, str | None]]:
    """(name, type, default)."""
    positional = [*args.posonlyargs, *args.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    for one, default in zip([*positional, *args.kwonlyargs], [*missing, *args.defaults, *args.kw_defaults]):
        yield one.arg, _written(one.annotation), None if default is None else ast.unparse(default)


def _fields(found: ast.ClassDef) -> Iterator[tuple[str, str, str | None]]:
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = node.value
            if isinstance(default, ast.Call):  # field(default=…)
                (default,) = (k.value for k in default.keywords if k.arg == "default")
            yield node.target.id, _written(node.annotation), None if default is None else ast.unparse(default)


def _written(annotation: ast.expr | None) -> str:
    """A type without typing's older spellings: Optional[Union[int, str]] is int | str | None."""
    if annotation is None:
        return "value"
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if annotation.value.id in ("Union", "Optional"):
            end = ["None"] if annotation.value.id == "Optional" else []
            return " | ".join([*map(_written, parts), *end])
    return ast.unparse(annotation).replace("'", "")


def _lightning() -> Path:
    """Where it is installed; nothing of it is imported."""
    spec = importlib.util.find_spec("lightning")
    if spec is None or spec.origin is None:
        raise ValueError("the package lightning is missing: pip install lightning")
    return Path(spec.origin).parent
