"""`merge`: the reference model of a heads folder as a Hugging Face folder, to train over and for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from train.option_parser import OptionParser
from train.whole_folder import whole_folder


def main(argv: Sequence[str]) -> int:
    parser = OptionParser(prog="python -m train merge", allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="folder heads/ that `fit` wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="model folder to write")
    parser.add_argument("--dtype", default="float32", help="of the weights: float32 (default), bfloat16 or float16")
    args = parser.parse_args(argv)
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists: choose another folder")
    from train.base_model import find_tokenizer, quiet
    from train.model import read_heads_record
    from train.reference import base_of, load_reference

    record = read_heads_record(args.checkpoint)
    if "backbone" not in record:
        raise ValueError(
            f"--checkpoint {args.checkpoint}: its base was frozen and is still {record['base']['name']!r}: nothing to "
            "merge"
        )
    model = load_reference(args.checkpoint, record, args.dtype)
    tokenizer = find_tokenizer(*base_of(args.checkpoint, record))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(args.output) as folder:
        with quiet():
            model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    print(f"wrote {args.output}: model.base of a config takes it, and its heads are {args.checkpoint} (warm_start)")
    return 0
