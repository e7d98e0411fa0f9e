"""LightningCLI for this project, with two traps mended, and what is said before a run.

A second run overwrites its config.yaml, and what the command line says holds against what a checkpoint stores. Imports
are late, so that --help is quick.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

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
GPU_TFLOPS, CPU_TFLOPS = 50.0, 0.2


def quieten() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for noise in _NOISE:
        warnings.filterwarnings("ignore", message=noise)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "💡" not in record.getMessage())


def print_estimate(cli: Any, base_config: Any, tflops: float, on_cpu: bool) -> None:
    """One line; on the first rank only."""
    from lightning.pytorch.utilities import rank_zero_only

    from train.estimate import estimate, workload

    if rank_zero_only.rank == 0:
        print(f"estimate: {estimate(base_config, workload(cli.config.fit.as_dict())).line(tflops, on_cpu)}")


def print_counts(cli: Any, num_bad: int | None = 5) -> None:
    """What the data module has counted in its rows; on the first rank only."""
    from lightning.pytorch.utilities import rank_zero_only

    from train.lint import show_counts

    if rank_zero_only.rank == 0:
        show_counts(console(), cli.datamodule.lints, num_bad)


def print_sample(cli: Any) -> None:
    """One row, and whose text the rows are; on the first rank only."""
    from lightning.pytorch.utilities import rank_zero_only
    from rich.text import Text

    from train.authorship import surprise
    from train.lint import show_row

    if rank_zero_only.rank != 0:
        return
    printer, data = console(), cli.datamodule
    show_row(printer, data.encoder, data.train_rows[0])
    found = surprise(cli.model.model.place(cli.trainer.strategy.root_device), data.train_rows)
    printer.print(Text(str(found), "bold red" if found.is_foreign else ""))


def console() -> Any:
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
            on_cpu = self.trainer.strategy.root_device.type == "cpu"
            print_estimate(self, self.model.model.base.config, CPU_TFLOPS if on_cpu else GPU_TFLOPS, on_cpu)
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
