"""The whole way on the real embedded model: train a few steps → export → generate, against Hugging Face."""

from pathlib import Path

import pytest
import torch

from export import bitwise, served_tokens
from infer import LLM, SamplingParams
from infer.strategy import Policy
from tests.conftest import ROOT
from train.base_model import EMBEDDED, load_base

NUM_TOKENS = 24
QUESTIONS = ["What is the capital of France?", "Give me three tips for learning to cook."]


@pytest.mark.real
def test_train_export_generate_on_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export.cli import main as export
    from train.cli import main as train

    monkeypatch.chdir(ROOT)
    # Both gates have tests of their own, and would take most of the time here
    monkeypatch.setattr(bitwise, "SHAPES", bitwise.SHAPES[:4])
    monkeypatch.setattr(served_tokens, "NUM_TOKENS", 6)
    run, artifact = tmp_path / "run", tmp_path / "artifact"
    fit = ["fit", "--config", "configs/smollm2-135m.yaml", f"--trainer.default_root_dir={run}"]
    assert train([*fit, "--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--data.max_length=64"]) == 0
    assert export(["--checkpoint", str(run / "heads"), "--output", str(artifact), "--backend", "eager"]) == 0

    llm = LLM(artifact, seed=0, max_num_seqs=2)
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=NUM_TOKENS)
    tokens = {}
    for strategy in ("autoregressive", "layerskip", "hispec"):
        llm.use(strategy, Policy(num_draft_tokens=3))
        for name, params in (("greedy", greedy), ("sampled", sampled)):
            tokens[strategy, name] = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    for name in ("greedy", "sampled"):
        assert tokens["hispec", name] == tokens["layerskip", name] == tokens["autoregressive", name]
    base = load_base(EMBEDDED)
    for prompt, got in zip(prompts, tokens["hispec", "greedy"], strict=True):
        out = base.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
        assert tuple(out[0, len(prompt) :].tolist()) == got
