import json
import shutil
from datetime import datetime

import pytest
import torch

from train.author import HuggingFaceAuthor
from train.formats import Encoder
from train.generate import GenerateOptions, generate, parse_options
from train.row_texts import RowTexts


def options(folder, tmp_path, **changes):
    base = {"base": str(folder), "output": tmp_path / "out.jsonl", "max_new_tokens": 6, "batch_size": 3}
    return GenerateOptions(**(base | {"dtype": "float32"} | changes))


def rows(options):
    return [json.loads(line) for line in options.output.read_text().split("\n") if line]


def prompts(tmp_path, lines):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(path)


def test_counts_add_up_and_a_second_run_goes_on(base_folder, tmp_path):
    file = prompts(tmp_path, [json.dumps({"prompt": f"The snow {n}"}) for n in range(7)])
    first = generate(options(base_folder, tmp_path, prompts=file, num_samples=4))
    out = tmp_path / "out.jsonl"
    out.write_bytes(out.read_bytes() + b'{"index": 99, "mess')  # killed while writing
    made = options(base_folder, tmp_path, prompts=file)
    second = generate(made)
    for counts in (first, second):
        assert counts.written + counts.failed + counts.skipped == counts.asked
    assert second.asked == 7 and second.before == first.written
    indices = [row["index"] for row in rows(made)]
    assert len(indices) == len(set(indices)) == second.written and set(indices) <= set(range(7))


def test_rows_stand_for_exactly_what_the_model_wrote(base_folder, tokenizer, tmp_path):
    made = options(
        base_folder, tmp_path, prompts=prompts(tmp_path, ['{"turns": ["so", "later"]}'] * 4), temperatures=(0.0,)
    )
    generate(made)
    encoder = Encoder(tokenizer, [2], 320)
    encoded = [encoder({k: v for k, v in row.items() if k != "index"}) for row in rows(made)]
    assert len({tuple(e.token_ids) for e in encoded}) == 1  # greedy
    assert 1 <= encoded[0].num_labels <= 6


def test_a_base_without_template_continues_from_bos(plain_folder, tmp_path):
    made = options(plain_folder, tmp_path, num_samples=3)
    counts = generate(made)
    assert counts.written > 0
    for row in rows(made):
        assert row["token_ids"][0] == 1 and row["loss_mask"] == [0] + [1] * (len(row["token_ids"]) - 1)


def test_a_base_without_template_gets_the_prompt_as_serving_tokenises_it(plain_folder, tmp_path, tokenizer):
    made = options(plain_folder, tmp_path, prompts=prompts(tmp_path, ['{"prompt": "The snow"}'] * 3))
    generate(made)
    served = tokenizer("The snow")["input_ids"]
    assert rows(made)
    for row in rows(made):
        start = row["loss_mask"].index(1)
        assert row["token_ids"][:start] == served


def test_questions_of_sharegpt_rows_are_answered_anew(base_folder, tokenizer, tmp_path):
    turns = [{"from": "human", "value": "The snow"}, {"from": "gpt", "value": "another author's"}]
    line = json.dumps({"conversations": turns, "system": "So slow"})
    made = options(base_folder, tmp_path, prompts=prompts(tmp_path, [line] * 3))
    generate(made)
    assert rows(made)
    for row in rows(made):
        text = tokenizer.decode(Encoder(tokenizer, [2], 320)(row).token_ids)
        asked = "<|im_start|>system\nSo slow<|im_end|>\n<|im_start|>user\nThe snow<|im_end|>\n<|im_start|>assistant\n"
        assert text.startswith(asked) and "another" not in text


def test_prompts_of_a_table_keep_what_json_has_no_type_for(base_folder, tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    turn = {"role": "user", "content": "The snow", "at": datetime(2025, 1, 2)}
    table = pyarrow.Table.from_pylist([{"messages": [turn], "prompt": None}, {"messages": None, "prompt": "so"}])
    pyarrow.parquet.write_table(table, tmp_path / "prompts.parquet")
    made = options(base_folder, tmp_path, prompts=str(tmp_path / "prompts.parquet"))
    monkeypatch.setattr(RowTexts, "_stands_for", lambda *_: True)  # a random model's tokens seldom stand for a text
    assert generate(made).skipped == 0
    assert [row["messages"][0].get("at") for row in rows(made)] == ["2025-01-02 00:00:00", None]


def test_too_long_prompts_are_skipped(base_folder, tmp_path):
    lines = [json.dumps({"prompt": "x" * 200}), json.dumps({"prompt": "so"})]
    counts = generate(options(base_folder, tmp_path, prompts=prompts(tmp_path, lines), max_prompt_tokens=60))
    assert counts.skipped >= 1 and counts.written + counts.failed + counts.skipped == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object with prompt, turns, messages or conversations"),
        ('{"prompt": ""}', "expected prompt, turns"),
        ('{"turns": []}', "expected prompt, turns"),
        ('{"messages": [1]}', r"messages\[0\]"),
        (r'{"prompt": "\ud83d x"}', "surrogate"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' stands twice"),
        ('{"prompt": "ä"}'.encode("latin-1"), "not UTF-8"),
        ('{"prompt": "a", "tools": [{"name": "f"}]}', "tools: "),
    ],
)
def test_a_bad_prompt_is_told_with_its_line_before_any_work(base_folder, tmp_path, line, reason):
    made = options(base_folder, tmp_path, prompts=prompts(tmp_path, ['{"prompt": "a"}', line]))
    with pytest.raises(ValueError, match=rf"prompts\.jsonl, line 2: .*{reason}"):
        generate(made)
    assert not made.output.exists()


def test_the_config_of_fit_gives_the_base():
    argv = ["--config", "configs/smollm2-135m.yaml", "--output", "x", "--num_samples", "1"]
    made = parse_options([*argv, "--temperature", "0.5", "1"])
    assert made.base == "smollm2-135m" and made.temperatures == (0.5, 1.0)


def test_the_bases_own_sampling_settings_change_no_row(base_folder, tmp_path):
    file = prompts(tmp_path, ['{"prompt": "The snow is so slow"}'] * 4)
    asked = {"prompts": file, "temperatures": (0.0, 1.0), "max_new_tokens": 20}
    plain = options(base_folder, tmp_path, output=tmp_path / "plain.jsonl", **asked)
    generate(plain)
    folder = shutil.copytree(base_folder, tmp_path / "penalised")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 3.0, "do_sample": True, "top_k": 1, "temperature": 0.1, "min_new_tokens": 19}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    made = options(folder, tmp_path, **asked)
    generate(made)
    assert rows(made) == rows(plain) and rows(made)


def test_a_batch_that_fails_is_counted_with_its_cause_and_the_others_go_on(base_folder, tmp_path, monkeypatch):
    file = prompts(tmp_path, [json.dumps({"prompt": f"The snow {n}"}) for n in range(7)])
    made = options(base_folder, tmp_path, prompts=file)
    write = HuggingFaceAuthor._continue

    def broken(self, tasks, *rest):
        if tasks[0].prompt.number == 3:
            raise torch.OutOfMemoryError("no memory\nfor that")
        return write(self, tasks, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(HuggingFaceAuthor, "_continue", broken)
        counts = generate(made)
    assert counts.failures == {"OutOfMemoryError: no memory": 3}
    assert counts.written + counts.failed + counts.skipped == counts.asked == 7
    assert not {row["index"] for row in rows(made)} & {3, 4, 5}
    again = generate(made)
    assert again.failed == 0 and again.written > counts.written


def test_a_base_whose_logits_are_nan_fails_its_rows(base_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("train.author.pick", lambda logits, _: torch.full((len(logits),), -1))
    counts = generate(options(base_folder, tmp_path, prompts=prompts(tmp_path, ['{"prompt": "so"}'] * 2)))
    assert counts.failures == {"RuntimeError: the base's logits hold NaN or infinity": 2}
