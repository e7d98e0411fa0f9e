"""Exits as plain Hugging Face models: the layers below an exit, its own layer and norm, and the whole unembedding.

A by-product for runtimes that know draft models and not exits (`assistant_model` in transformers). Nothing here knows
programs or pages. Every folder is loaded back by transformers and compared with the exit before it may appear.
"""

# Shape legend: T positions, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from export.draft_card import TAG, DraftFacts, draft_card
from export.parity import ParityError, calibration_rows, relative_error
from train.base_model import base_fingerprint, dtype_of, load_base
from train.heads import ExitConfig, ExitHead
from train.model import EarlyExitModel
from train.whole_folder import whole_folder

MAX_ERROR = 1e-6  # of the logits' scale, in fp32: the same operations on the same numbers


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """What to write. With one dtype a model is folder/<exit>, with several folder/<exit>-<dtype>."""

    folder: Path
    dtypes: tuple[str, ...] = ("float32",)
    device: str = "cpu"  # where the check runs
    overwrite: bool = False
    reference: dict[str, Any] | None = None  # what exits.json says of a new reference model


def check_forms(exits: Sequence[ExitConfig]) -> None:
    """ValueError that names every exit which no plain model can stand for, and why."""
    reasons = []
    for e in exits:
        if e.head in ("linear", "linear_layer"):
            reasons.append(
                f"exits.{e.name}.head={e.head!r} has a matrix W of its own, for which a plain model has no place "
                "(train it with head: layer)"
            )
        if e.context:
            reasons.append(
                f"exits.{e.name}.context={e.context} reads the target's hidden state, which a draft model is not given "
                "(train it with context: 0)"
            )
    if reasons:
        raise ValueError(
            "--hf-draft: not every exit has a plain Hugging Face form: " + "; ".join(reasons) + ". Train them so, "
            "or leave --hf-draft out"
        )


def check_folder(options: DraftOptions) -> None:
    """ValueError when something stands at the folder that must not be replaced."""
    folder = options.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--hf-draft {folder} is a file: name a folder")
    if folder.exists() and not options.overwrite:
        raise ValueError(f"--hf-draft {folder} exists: choose another folder, or add --overwrite to replace it")
    if folder.exists() and not all(_is_ours(child) for child in folder.iterdir()):
        raise ValueError(f"--hf-draft {folder} holds something that --hf-draft has not written; it won't be replaced")


def _is_ours(folder: Path) -> bool:
    card = folder / "README.md"
    return card.is_file() and f"\n- {TAG}\n" in card.read_text(errors="replace")


def write_drafts(
    make_model: Callable[[str], EarlyExitModel],
    tokenizer: Any,
    options: DraftOptions,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write every exit of the model to `options.folder`, which appears whole or not at all.

    Args:
        make_model: dtype → the early-exit model, new at each call.
        tokenizer: saved in every folder; None when the base has none.
        report: gets a line for each model.

    Raises:
        ValueError: the folder is in the way, or an exit has no plain form.
        ParityError: a written model does not compute what its exit computes.
    """
    check_folder(options)
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(options.folder, before_move=lambda: check_folder(options)) as folder:
        for dtype in options.dtypes:
            # The file's numbers in fp32: what is written is compared where rounding does not blur it
            model = _rounded(make_model("float32"), dtype_of(dtype)).place(options.device)
            check_forms(model.exits)
            rows = [row.to(options.device) for row in calibration_rows(model.family.vocab_size, tokenizer)]
            expected, target = _own_logits(model, rows)
            # What training made of a base has no name of its own: the card tells where it comes from
            base = options.reference["trained_from"] if options.reference else base_fingerprint(model.base)
            for e in model.exits:
                name = e.name if len(options.dtypes) == 1 else f"{e.name}-{dtype}"
                num_parameters = _write_model(folder / name, model, e, dtype_of(dtype), tokenizer)
                error = _check(folder / name, rows, expected[e.name], e.name)
                facts = DraftFacts(
                    exit=e,
                    base=base["name"] or "",
                    revision=base["revision"],
                    num_layers=model.family.num_layers,
                    num_parameters=num_parameters,
                    base_parameters=model.base.num_parameters(),
                    dtype=dtype,
                    path=options.folder / name,
                    agreement=None if tokenizer is None else _agreement(expected[e.name], target),
                    num_positions=sum(len(row) for row in rows),
                    reference=options.reference,
                )
                (folder / name / "README.md").write_text(draft_card(facts))
                report(f"{dtype}: {options.folder / name}, {num_parameters / 1e6:.1f} M parameters, error {error:.1e}")
    return options.folder


@torch.no_grad()
def _rounded(model: EarlyExitModel, dtype: torch.dtype) -> EarlyExitModel:
    """The fp32 model with every weight at the value that it has in `dtype`; buffers are made anew by who loads it."""
    for parameter in (*model.base.parameters(), *model.heads.parameters()):
        parameter.copy_(parameter.to(dtype))
    return model


@torch.no_grad()
def _own_logits(model: EarlyExitModel, rows: Sequence[Tensor]) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Exit name → logits [T, V] of each row over the whole vocabulary; and the target's."""
    outputs = [model(row.unsqueeze(0)) for row in rows]
    exits = {e.name: [model.unembed(o.exits[e.name])[0] for o in outputs] for e in model.exits}
    return exits, [model.unembed(o.target)[0] for o in outputs]


def _agreement(exit_logits: Sequence[Tensor], target_logits: Sequence[Tensor]) -> float:
    picks = [torch.cat(list(logits)).argmax(-1) for logits in (exit_logits, target_logits)]
    return float((picks[0] == picks[1]).double().mean())


def _write_model(folder: Path, model: EarlyExitModel, exit_: ExitConfig, dtype: torch.dtype, tokenizer: Any) -> int:
    """Weights, config, generation config and tokenizer; returns the number of parameters."""
    base, family, head = model.base, model.family, cast(ExitHead, model.heads[exit_.name])
    # An exit's own layer was made from the base's last one, and is of its kind
    kinds = [*range(exit_.layer), *([family.num_layers - 1] if head.layer is not None else [])]
    config = family.config_of_layers(kinds)
    config.architectures = [type(base).__name__]
    config.dtype = dtype
    config.tie_word_embeddings = family.unembedding is base.get_input_embeddings().weight
    state = {k: v.to("cpu", dtype).contiguous() for k, v in _state(model, exit_, head).items()}
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    if base.generation_config is not None:
        base.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return sum(tensor.numel() for tensor in state.values())


def _state(model: EarlyExitModel, exit_: ExitConfig, head: ExitHead) -> dict[str, Tensor]:
    """Weights by the names of the base's class. Tied embeddings stand once."""
    family, base = model.family, model.base
    layers, norm = f"{family.decoder_path}.layers.", f"{family.norm_path}."
    left_out = [norm] if head.norm is not None else []
    left_out += [f"{layers}{number}." for number in range(exit_.layer, family.num_layers)]
    if family.unembedding is base.get_input_embeddings().weight:
        left_out.append("lm_head.")
    state = {name: tensor for name, tensor in base.state_dict().items() if not name.startswith(tuple(left_out))}
    if head.layer is not None:
        state |= {f"{layers}{exit_.layer}.{name}": tensor for name, tensor in head.layer.state_dict().items()}
    if head.norm is not None:
        state |= {f"{norm}{name}": tensor for name, tensor in head.norm.state_dict().items()}
    return state


@torch.no_grad()
def _check(folder: Path, rows: Sequence[Tensor], expected: Sequence[Tensor], name: str) -> float:
    """The error of the folder, as transformers loads it, relative to the exit's logits; ParityError above MAX_ERROR."""
    loaded = load_base(str(folder.resolve())).to(rows[0].device)
    got = [loaded(row.unsqueeze(0), use_cache=False).logits[0] for row in rows]
    error = relative_error(torch.cat(got), torch.cat(list(expected)))
    if not error <= MAX_ERROR:  # NaN too
        raise ParityError(
            f"exit {name}: the plain model's logits differ from the exit's by {error:.2e} of their scale, at most "
            f"{MAX_ERROR:.0e} is allowed; nothing was written to --hf-draft"
        )
    return error
