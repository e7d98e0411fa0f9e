"""The command line: `fit`, `validate` and `test` through LightningCLI; `estimate`, `lint` and `probe` before them, and
`measure` after them; `generate` and `merge` beside them.

Three traps of LightningCLI are mended: a second run overwrites its config.yaml, what the command line says holds
against what a checkpoint stores, and mistakes come as one line. Imports are late, so that --help is quick.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

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
  generate   make training text with the base model itself (resumable)
  merge      write the reference model that a heads/ of backbone lora or full belongs to, as a Hugging Face folder

common options of all but generate and merge (each key of the config is one: --section.key VALUE):
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

# Warnings of Lightning that name nothing a user could or should change here
_NOISE = (
    ".*does not have many workers.*",
    ".*LeafSpec.* is deprecated.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*LightningCLI's args parameter.*",
    ".*tensorboardX. has been removed.*",
    ".*is not supported by the model summary.*",
    ".*module\\(s\\) in eval mode at the start of training.*",
    ".*It is recommended to use `self.log\\('(val|test)/.*sync_dist=True.*",  # the figures are sums over ranks already
)

# 10¹² operations a second: a guess for a GPU, a third of an A100's in bf16; seen on one CPU core with AMX
_GPU_TFLOPS, _CPU_TFLOPS = 50.0, 0.2

LIGHTNING_COMMANDS = ("fit", "validate", "test")
COMMANDS = ("estimate", "lint", "probe", *LIGHTNING_COMMANDS, "measure", "generate", "merge")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it went well, 2 for what the user can mend (one line on stderr), 143 after SIGTERM."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if argv else 2
    try:
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
    if name == "merge":
        from train.merge import main as merge_main

        return merge_main
    if name == "estimate":
        return run_estimate
    if name == "lint":
        return run_lint
    if name == "probe":
        return run_probe
    if name == "measure":
        return run_measure
    if name in LIGHTNING_COMMANDS:
        return lambda argv: run_lightning([name, *argv])
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


def run_lightning(argv: Sequence[str]) -> int:
    """`fit`, `validate` or `test`."""
    _quieten()
    make_cli(argv)
    return 0


def run_estimate(argv: Sequence[str]) -> int:
    """`estimate`: takes what `fit` takes; the base's weights are not read."""
    from train.base_model import load_config

    _quieten()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tflops", type=float, default=_GPU_TFLOPS)
    try:
        own, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if not own.tflops > 0:
        raise ValueError(f"--tflops {own.tflops:g} must be greater than 0")
    cli = make_cli(["fit", *rest], run=False, instantiate=False)
    model = cli.config.fit.model
    print_estimate(cli, load_config(model.base, model.revision), own.tflops)
    return 0


def run_lint(argv: Sequence[str]) -> int:
    """`lint`: what `fit` prints before its first step, with all bad rows; 2 if `fit` would stop for one."""
    _quieten()
    cli = make_cli(["fit", *argv], run=False)
    data = cli.datamodule
    stops, data.on_bad_row = data.on_bad_row == "fail", "skip"
    data.read()
    print_counts(cli, num_bad=None)
    data.check()
    print_sample(cli)
    return 2 if stops and any(lint.bad for lint in data.lints) else 0


def run_probe(argv: Sequence[str]) -> int:
    """`probe`: the figures of exits that are not trained yet; on the first rank only."""
    from lightning.pytorch.utilities import rank_zero_only

    from train import probe, probe_report

    options, rest = probe.parse_options(argv)
    probe_report.check_files(options)
    _quieten()
    cli = make_cli(["fit", *rest], run=False)
    if rank_zero_only.rank == 0:
        cli.datamodule.setup("fit")
        print_counts(cli)
        found = probe.run(cli, options)
        probe_report.show(_console(), found)
        probe_report.write(found, options)
    return 0


def run_measure(argv: Sequence[str]) -> int:
    """`measure`: 1 if validation and engine differ by more than --tolerance."""
    from infer.llm import LLM
    from train import measure
    from train.engine_author import check_base

    options, rest = measure.parse_options(argv)
    _quieten()
    cli = make_cli(["fit", *rest], run=False)
    module, data = cli.model, cli.datamodule
    if not module.is_warm:
        raise ValueError("measure: model.warm_start is not set: name the folder heads/ that the artifact was made of")
    vocab_sizes = [
        len(module.model.draft_vocabs[e.name]) if e.name in module.model.draft_vocabs else None
        for e in module.model.exits
    ]
    manifest = measure.check_artifact(options.artifact, module.model.exits, vocab_sizes)
    check_base(manifest, options.artifact, cli.config.fit.model.base, cli.config.fit.model.revision)
    data.setup("fit")
    module.model.place(cli.trainer.strategy.root_device)
    found = measure.measure(
        module, LLM(options.artifact, "layerskip"), data.val_rows[: options.num_prompts], options.max_new_tokens
    )
    _console().print(measure.table(found))
    _console().print(f"largest difference {found.largest_difference:.1f} points, allowed {options.tolerance:g}")
    return 0 if found.largest_difference <= options.tolerance else 1


def _quieten() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for noise in _NOISE:
        warnings.filterwarnings("ignore", message=noise)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "💡" not in record.getMessage())


def print_estimate(cli: Any, base_config: Any, tflops: float) -> None:
    """One line; on the first rank only."""
    from lightning.pytorch.utilities import rank_zero_only

    from train.estimate import estimate, workload

    if rank_zero_only.rank == 0:
        print(f"estimate: {estimate(base_config, workload(cli.config.fit.as_dict())).line(tflops)}")


def print_counts(cli: Any, num_bad: int | None = 5) -> None:
    """What the data module has counted in its rows; on the first rank only."""
    from lightning.pytorch.utilities import rank_zero_only

    from train.lint import show_counts

    if rank_zero_only.rank == 0:
        show_counts(_console(), cli.datamodule.lints, num_bad)


def print_sample(cli: Any) -> None:
    """One row, and whose text the rows are; on the first rank only."""
    from lightning.pytorch.utilities import rank_zero_only
    from rich.text import Text

    from train.authorship import surprise
    from train.lint import show_row

    if rank_zero_only.rank != 0:
        return
    console, data = _console(), cli.datamodule
    show_row(console, data.encoder, data.train_rows[0])
    found = surprise(cli.model.model.place(cli.trainer.strategy.root_device), data.train_rows)
    console.print(Text(str(found), "bold red" if found.is_foreign else ""))


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def make_cli(argv: Sequence[str], run: bool = True, instantiate: bool = True) -> Any:
    """The LightningCLI of this project.

    Args:
        run: False: parse and instantiate, and don't run the subcommand.
        instantiate: False (with run=False): parse, and no more.
    """
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    from train.checkpoint import check_checkpoint
    from train.data import DistillationDataModule
    from train.module import EarlyExitModule

    class HiSpecCLI(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            """Only the one that is asked for: the parsers of the others would cost a second."""
            return {command: skipped for command, skipped in LightningCLI.subcommands().items() if command == argv[0]}

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.link_arguments("model.base", "data.base")
            parser.link_arguments("model.revision", "data.revision")

        def instantiate_classes(self) -> None:
            if instantiate:
                super().instantiate_classes()

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            try:
                return super().instantiate_trainer(**kwargs)
            except TypeError as error:  # Lightning's answer to devices: "two"
                raise ValueError(f"trainer: {error} (devices={self._get(self.config, 'trainer.devices')!r})") from error

        def before_fit(self) -> None:
            self.datamodule.setup("fit")  # bad rows are told before anything is written
            on_gpu = self.trainer.strategy.root_device.type == "cuda"
            print_estimate(self, self.model.model.base.config, _GPU_TFLOPS if on_gpu else _CPU_TFLOPS)
            print_counts(self)
            print_sample(self)

        def before_validate(self) -> None:
            self.datamodule.setup("validate")
            print_counts(self)

        before_test = before_validate

        def _run_subcommand(self, subcommand: str) -> None:
            if run:
                super()._run_subcommand(subcommand)

        def _parse_ckpt_path(self) -> None:
            """Lightning would let a checkpoint's stored hyper-parameters override the command line: only look at it."""
            command = self.config.get("subcommand")
            path = self.config[command].get("ckpt_path") if command else None
            if run and path not in (None, "best", "last", "hpc", "registry"):
                check_checkpoint(path)

    return HiSpecCLI(
        EarlyExitModule,
        DistillationDataModule,
        args=list(argv),
        seed_everything_default=0,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"exit_on_error": False, argv[0]: {"exit_on_error": False}},
    )
