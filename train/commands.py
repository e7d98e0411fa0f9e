"""What each command of `python -m train` does, but for those that have files of their own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from train import measure_options, probe_options
from train.lightning_cli import (
    GPU_TFLOPS,
    console,
    make_cli,
    print_counts,
    print_estimate,
    print_sample,
    quieten,
)


def run_lightning(argv: Sequence[str]) -> int:
    """`fit`, `validate` or `test`."""
    quieten()
    make_cli(argv)
    return 0


def run_estimate(argv: Sequence[str]) -> int:
    """`estimate`: takes what `fit` takes; the base's weights are not read."""
    from train.base_model import load_config

    quieten()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tflops", type=float, default=GPU_TFLOPS)
    try:
        own, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if not own.tflops > 0:
        raise ValueError(f"--tflops {own.tflops:g} must be greater than 0")
    cli = make_cli(["fit", *rest], run=False, instantiate=False)
    model, accelerator = cli.config.fit.model, cli.config.fit.trainer.accelerator
    print_estimate(cli, load_config(model.base, model.revision), own.tflops, on_cpu=accelerator == "cpu")
    return 0


def run_lint(argv: Sequence[str]) -> int:
    """`lint`: what `fit` prints before its first step, with all bad rows; 2 if `fit` would stop for one."""
    quieten()
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
    options, rest = probe_options.parse_options(argv)
    from lightning.pytorch.utilities import rank_zero_only

    from train import probe, probe_report

    probe_report.check_files(options)
    quieten()
    cli = make_cli(["fit", *rest], run=False)
    if rank_zero_only.rank == 0:
        cli.datamodule.setup("fit")
        print_counts(cli)
        found = probe.run(cli, options)
        probe_report.show(console(), found)
        probe_report.write(found, options)
    return 0


def run_measure(argv: Sequence[str]) -> int:
    """`measure`: 1 if validation and engine differ by more than --tolerance."""
    options, rest = measure_options.parse_options(argv)
    from infer.llm import LLM
    from train import measure
    from train.engine_author import check_base

    quieten()
    cli = make_cli(["fit", *rest], run=False)
    module, data = cli.model, cli.datamodule
    if not module.is_warm:
        raise ValueError("measure: model.warm_start is not set: name the folder heads/ that the artifact was made of")
    manifest = measure.check_artifact(options.artifact, module.model)
    check_base(manifest, options.artifact, cli.config.fit.model.base, cli.config.fit.model.revision)
    data.setup("fit")
    module.model.place(cli.trainer.strategy.root_device)
    found = measure.measure(
        module, LLM(options.artifact, "layerskip"), data.val_rows[: options.num_prompts], options.max_new_tokens
    )
    console().print(measure.table(found))
    console().print(f"largest difference {found.largest_difference:.1f} points, allowed {options.tolerance:g}")
    return 0 if found.largest_difference <= options.tolerance else 1


def run_promise(argv: Sequence[str]) -> int:
    """`promise`: validation.json of a folder heads/ that has none, or another one; its weights stay as they are."""
    from pathlib import Path

    from train.counting import promise
    from train.promise import FILE, describe

    quieten()
    cli = make_cli(["fit", *argv], run=False)
    module, data, folder = cli.model, cli.datamodule, cli.config.fit.model.warm_start
    if not module.is_warm:
        raise ValueError("promise: model.warm_start is not set: name the folder heads/ whose exits are to be validated")
    if not Path(folder).is_dir():
        raise ValueError(f"promise: model.warm_start={folder} is no folder on this machine, to write into")
    data.setup("fit")
    module.model.place(cli.trainer.strategy.root_device)
    with cli.trainer.precision_plugin.val_step_context():
        found = promise(module, data.val_rows)
    assert found is not None, "the data module has refused rows without labels"
    found.write(Path(folder))
    sums = {name: found.acceptance(name) for name in found.exits}
    print(f"wrote {Path(folder) / FILE}: {len(found.rows)} held-out rows, {describe(sums)}")
    return 0
