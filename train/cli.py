"""The command line: `fit`, `validate` and `test` through LightningCLI; `estimate`, `lint` and `probe` before them,
`measure` and `promise` after them; `generate`, `push` and `merge` beside them. Mistakes come as one line.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence

from train import commands, option_help

HELP = """\
usage: python -m train COMMAND --config FILE [options]

Train early exits over a base model, which stays frozen unless model.backbone says otherwise.

commands:
  estimate   what fit would need: memory, disk, time; reads the base's config, no weights and no text
  lint       look at the training text: counts, masks against serving's prompts, one row in colour, whose text it is
  probe      how good an exit would be at each depth, and which to train; fits linear heads in closed form
  fit        estimate and lint, then train the exits; leaves checkpoints and heads/ under trainer.default_root_dir
  validate   loss, acceptance and predicted speed-up of every exit on held-out text
  test       the same, logged as test/…
  measure    the same acceptance as validation counts it and as the engine of an artifact does, on one text
  promise    write validation.json into the heads/ of model.warm_start, which export holds programs to; fit does it too
  generate   make training text with the base model itself (resumable)
  push       put a heads/ on the Hugging Face hub, with a model card; --checkpoint and warm_start take its id
  merge      write the reference model that a heads/ of backbone lora or full belongs to, as a Hugging Face folder

common options of all but generate, push and merge (each key of the config is one: --section.key VALUE):
  --config FILE              e.g. configs/smollm2-135m.yaml
  --ckpt_path FILE           fit: resume a run where it stopped, e.g. runs/smollm2-135m/last.ckpt or interrupted.ckpt;
                             validate and test: measure its heads; lint, probe: not read
  --model.warm_start DIR     begin with the weights of a folder heads/, and nothing else
  --model.lr 1e-3            any key of the section model
  --data.train_files FILE    any key of the section data
  --trainer.max_epochs N     any argument of Lightning's Trainer
  --tflops N                 estimate: 10¹² operations a second that the device reaches (default: 50)
  --print_config             show the whole config that results, and stop

`python -m train COMMAND --help` lists every option. Set HISPEC_DEBUG=1 to see tracebacks.
"""

LIGHTNING_COMMANDS = ("fit", "validate", "test")
COMMANDS = ("estimate", "lint", "probe", *LIGHTNING_COMMANDS, "measure", "promise", "generate", "push", "merge")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it went well, 2 for what the user can mend (one line on stderr), 143 after SIGTERM."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if argv else 2
    try:
        if argv[0] in option_help.WHAT and {"-h", "--help"} & set(argv[1:]):
            print(option_help.help_text(argv[0]), end="")
            return 0
        return _command(argv[0])(argv[1:])
    except SystemExit as exit_:  # --help and --print_config
        if type(exit_).__name__ == "SIGTERMException":  # Lightning's; interrupted.ckpt is written
            return 128 + signal.SIGTERM
        return int(exit_.code or 0) if not isinstance(exit_.code, str) else 2
    except _user_errors() as error:
        if os.environ.get("HISPEC_DEBUG"):
            raise
        print(f"error: {_one_line(str(error))}", file=sys.stderr)
        return 2


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name == "generate":
        from train.generate import main as generate_main

        return generate_main
    if name == "push":
        from train.push import main as push_main

        return push_main
    if name == "merge":
        from train.merge import main as merge_main

        return merge_main
    if name in LIGHTNING_COMMANDS:
        return lambda argv: commands.run_lightning([name, *argv])
    own = {
        "estimate": commands.run_estimate,
        "lint": commands.run_lint,
        "probe": commands.run_probe,
        "measure": commands.run_measure,
        "promise": commands.run_promise,
    }
    if name in own:
        return own[name]
    raise ValueError(f"{name!r} is no command; expected one of {', '.join(COMMANDS)}")


def _user_errors() -> tuple[type[BaseException], ...]:
    errors: list[type[BaseException]] = [ValueError, FileNotFoundError]
    if "lightning.pytorch" in sys.modules:
        from jsonargparse import ArgumentError
        from lightning.pytorch.utilities.exceptions import MisconfigurationException

        errors += [ArgumentError, MisconfigurationException]
    return tuple(errors)


def _one_line(message: str) -> str:
    """jsonargparse tells one mistake once per member of a Union: keep what names the key and the reason."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    noise = ("- Expected a <class 'NoneType'>", "Subtypes with failures", "Does not validate against any of the Union")
    kept = [line for line in lines if not line.startswith(noise)]
    return " ".join(kept or lines or ["unknown error"]) + _hint(message)


def _hint(message: str) -> str:
    """For a misspelt key of `model` or `data`: the nearest one there is, and all others."""
    found = re.search(r"\b(model|data)\.(\w+)", message)
    if not found or ("not accept option" not in message and "unrecognized arguments" not in message):
        return ""
    from train.data import DistillationDataModule
    from train.module import EarlyExitModule

    section, key = found.groups()
    keys = list(inspect.signature(EarlyExitModule if section == "model" else DistillationDataModule).parameters)
    near = difflib.get_close_matches(key, keys, n=1)
    return f"; {section} has {', '.join(keys)}" + (f". Did you mean {section}.{near[0]}?" if near else "")
