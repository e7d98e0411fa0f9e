"""Other people's programs against our server: LangChain's chat model, and EleutherAI's lm-eval.

Neither is part of the development environment; where one is missing its test is skipped, and says how to get it.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer.llm import LLM
from infer.params import SamplingParams
from tests.infer.server.harness import MODEL, on_port, served

pytestmark = pytest.mark.slow

QUESTION = "Hello, river!"
MESSAGES = [{"role": "user", "content": QUESTION}]


def test_langchains_chat_model_gets_the_runtimes_texts(llm: LLM, reference: LLM) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    params = SamplingParams(temperature=0, max_tokens=12)
    text = reference.chat(MESSAGES, params)[0].outputs[0]
    want, messages = text.text, [("human", QUESTION)]
    stop = want[len(want) // 2 :][:3]
    assert len(text.token_ids) == 12 and len(stop) == 3
    with served(llm) as one, on_port(one) as address:
        chat = langchain.ChatOpenAI(
            base_url=address + "/v1", api_key="none", model=MODEL, temperature=0, max_tokens=12, max_retries=0
        )
        answer = chat.invoke(messages)
        assert answer.content == want
        assert answer.usage_metadata["output_tokens"] == 12 and answer.response_metadata["finish_reason"] == "length"
        chunks = list(chat.stream(messages))
        assert "".join(chunk.content for chunk in chunks) == want and len(chunks) > 3
        stopped = chat.invoke(messages, stop=[stop])
        assert stopped.content == want[: want.index(stop)]
        assert stopped.response_metadata["finish_reason"] == "stop"


ROWS = [
    {"question": "by the river", "choices": [" and the sea", " slow", " now"], "answer": 0},
    {"question": "Hello, world! A small", "choices": [" house", " Hello", " zebra"], "answer": 1},
    {"question": "the lamp", "choices": [" and the", " xyz", " now the river"], "answer": 2},
]
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
metadata: {{version: 0}}
"""


def test_lm_eval_finds_the_models_own_likelihoods(llm: LLM, reference: LLM, artifact: Path, tmp_path: Path) -> None:
    """`local-completions` scores a choice by the prompt's logprobs: `echo`, `logprobs` and one token."""
    pytest.importorskip("lm_eval", reason="pip install 'lm-eval[api]'")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "tiny_choice.yaml").write_text(TASK.format(rows=rows))
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with served(llm) as one, on_port(one) as address:
        options = [f"model={MODEL}", f"base_url={address}/v1/completions", f"tokenizer={artifact}"]
        options += ["tokenizer_backend=huggingface", "max_length=64"]
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", ",".join(options)]
        command += ["--tasks", "tiny_choice", "--include_path", str(tmp_path), "--batch_size", "1", "--log_samples"]
        command += ["--output_path", str(tmp_path / "out")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("samples_tiny_choice_*.jsonl")
    samples = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda one: one["doc_id"])
    assert len(samples) == len(ROWS)
    num_right = 0
    for row, sample in zip(ROWS, samples, strict=True):
        found = [float(likelihood) for ((likelihood, _),) in sample["resps"]]
        want = [likelihood(reference, row["question"], choice) for choice in row["choices"]]
        assert found == pytest.approx(want, abs=1e-3)
        num_right += want.index(max(want)) == row["answer"]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    accuracy = json.loads(results.read_text())["results"]["tiny_choice"]["acc,none"]
    assert math.isclose(accuracy, num_right / len(ROWS))


def likelihood(reference: LLM, context: str, choice: str) -> float:
    """log p of a choice's tokens after those of its context, by the runtime itself."""
    ids = reference.tokenizer(context + choice)["input_ids"]
    start = len(reference.tokenizer(context)["input_ids"])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = reference.generate({"prompt_token_ids": ids}, params)
    assert output.prompt_logprobs is not None
    return sum(output.prompt_logprobs[i][ids[i]].logprob for i in range(start, len(ids)))
