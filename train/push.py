"""`push`: a folder heads/ to the Hugging Face hub, where `export --checkpoint OWNER/NAME` and warm_start find it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from infer.hub import check_login, push_folder
from train.option_parser import OptionParser

if TYPE_CHECKING:
    from train.promise import Promise

TAG = "hispec-heads"


def main(argv: Sequence[str]) -> int:
    parser = OptionParser(prog="python -m train push", allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="folder heads/ that `fit` wrote")
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME", help="on the hub; public, if it is new")
    args = parser.parse_args(argv)
    from train.model import read_heads_record
    from train.promise import Promise

    record, promise = read_heads_record(args.checkpoint), Promise.read(args.checkpoint)
    check_login(args.repo)
    own = args.checkpoint / "README.md"
    card = own.read_text(encoding="utf-8") if own.is_file() else heads_card(record, promise, args.repo)
    address = push_folder(args.checkpoint, args.repo, card, "HiSpec heads")
    print(f"pushed {args.checkpoint} to {address}: python -m export --checkpoint {args.repo} builds an artifact of it")
    return 0


def heads_card(record: dict[str, Any], promise: Promise | None, repo: str) -> str:
    """README.md with the hub's metadata on top.

    Args:
        record: of exits.json.
        promise: what validation says of the exits; None: nothing was written down.
    """
    from train.reference import describe_reference

    base, backbone = record["base"]["name"], record.get("backbone")
    trained = base if backbone is None else backbone["trained_from"]["name"]
    lines = [f"# Early exits for {trained}", "", f"Heads that HiSpec trained onto `{trained}`."]
    if backbone is not None:
        lines += ["", f"Their target is {describe_reference(backbone)}."]
    lines += ["", "| exit | layer | head | ids | agreement | mean acceptance length |", "|---|---|---|---|---|---|"]
    for e in record["exits"]:
        counted = None if promise is None else promise.acceptance(e["name"])
        figures = "– | –" if counted is None else f"{counted.agreement:.1%} | {counted.length:.2f}"
        lines.append(f"| {e['name']} | {e['layer']} | {e['head']} | {e['vocab_size'] or 'all'} | {figures} |")
    if promise is not None:
        lines += ["", f"Figures on {len(promise.rows)} held-out rows, drafts of {promise.num_draft_tokens} tokens."]
    lines += ["", "```", f"python -m export --checkpoint {repo} --output artifacts/{repo.split('/')[1]}", "```", ""]
    metadata: dict[str, Any] = {"library_name": "hispec", "tags": [TAG, "speculative-decoding"]}
    if trained.count("/") == 1 and not trained.startswith((".", "/", "~")):
        metadata["base_model"] = trained
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n" + "\n".join(lines)
