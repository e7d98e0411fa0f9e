"""The side of the llama.cpp peer: llama-cpp-python in an environment of its own, which needs nothing of ours.

Run by its path. `infer.peers.gguf` makes the file that it reads.
"""

import argparse
import json
import sys
import time


def main() -> None:
    """Load the model, then answer requests from stdin until it closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a .gguf file")
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="most tokens of a text, its prompt's among them")
    args = parser.parse_args()
    try:
        from llama_cpp import Llama
    except ImportError as error:
        sys.exit(f"llama-cpp: {error}; pip install llama-cpp-python in the environment that --peer-python names")
    threads = {"n_threads": args.num_threads, "n_threads_batch": args.num_threads}
    model = Llama(args.model, n_ctx=args.context, verbose=False, **threads)
    end = model.token_eos()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        (prompt,) = request["prompts"]
        start = time.perf_counter()
        model.reset()  # else it would keep what two prompts share, which no one else may
        token_ids = []
        for token_id in model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0, reset=True):
            token_ids.append(token_id)
            if token_id == end or len(token_ids) == request["max_tokens"]:
                break
        seconds = time.perf_counter() - start
        print(json.dumps({"token_ids": [token_ids], "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
