"""Text by the engine of an artifact: row for row what Hugging Face writes, whatever the batch, restarts and shards."""

import json
from collections import Counter

import pytest

import infer
from export.writer import ExportOptions, write_artifact
from infer.runner import Runner
from tests.tiny_artifact import VOCAB_SIZE, load, make_tokenizer
from tests.tiny_engine import DEVICE
from tests.tiny_models import make_tiny_model
from train.base_model import load_base
from train.engine_author import EngineAuthor
from train.generate import GenerateOptions, generate
from train.heads import ExitConfig
from train.model import EarlyExitModel

EOS = [0, *range(100, 130)]  # so many that a random model ends now and then


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / "base"
    model = make_tiny_model("llama", num_hidden_layers=3, vocab_size=VOCAB_SIZE, eos_token_id=EOS, pad_token_id=0)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def artifact(base, tmp_path_factory):
    def make_model(dtype):
        exits = [ExitConfig(name=n, layer=at, head="native") for n, at in (("draft", 1), ("intermediate", 2))]
        return EarlyExitModel(load_base(str(base), dtype=dtype), exits).eval()

    output = tmp_path_factory.mktemp("generate") / "artifact"
    made = ExportOptions(output=output, max_model_len=128, block_size=4, prefill_chunk=16, device=str(DEVICE))
    return write_artifact(make_model, make_tokenizer(), made)


@pytest.fixture(scope="module")
def llm(artifact):
    return load(artifact, max_num_seqs=8)


@pytest.fixture(autouse=True)
def one_llm(llm, monkeypatch):
    """Loading takes longer than writing: all runs share one, a run that was killed leaves it requests to end."""

    def take(_, strategy, **__):
        for request in [*llm.engine.waiting, *llm.engine.running]:
            llm.engine.abort(request.request_id)
        llm.use("autoregressive" if strategy == "auto" else strategy)
        return llm

    monkeypatch.setattr(infer, "LLM", take, raising=False)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"River {'stones and ' * (n % 4)}{n}"}) + "\n" for n in range(9)))
    return str(path)


@pytest.fixture
def write(artifact, tmp_path):
    """Generate into a file of that name; the rows in order of their index, and the counts."""

    def write(name="out", **changes):
        defaults = {"max_new_tokens": 12, "max_question_tokens": 20, "batch_size": 4, "device": str(DEVICE)}
        if not {"base", "artifact"} & changes.keys():
            defaults["artifact"] = artifact
        made = GenerateOptions(output=tmp_path / f"{name}.jsonl", **(defaults | changes))
        counts = generate(made)
        assert counts.written + counts.failed + counts.skipped == counts.asked
        return rows(made.output), counts

    return write


def rows(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert max(Counter(row["index"] for row in found).values(), default=0) <= 1
    return sorted(found, key=lambda row: row["index"])


@pytest.mark.parametrize("temperatures", [(0.0,), (0.5, 0.0, 1.3)])
def test_the_engine_writes_what_hugging_face_writes(base, write, questions, temperatures):
    both = {"prompts": questions, "temperatures": temperatures}
    theirs, _ = write("hf", base=str(base), dtype="float32", **both)
    ours, counts = write("engine", **both)
    assert ours == theirs and counts.written >= 6
    for name in ("layerskip", "hispec"):
        assert write(name, strategy=name, **both)[0] == ours
    other, _ = write("seed", seed=1, **both)
    greedy = [row for row in ours if temperatures[row["index"] % len(temperatures)] == 0]
    assert [row for row in other if temperatures[row["index"] % len(temperatures)] == 0] == greedy
    assert (other == ours) == (greedy == ours)


def test_self_asked_rows_are_the_same_by_both_and_begin_with_their_openings(base, write, tmp_path):
    openings = tmp_path / "openings.txt"
    openings.write_text("Hello,\n\n-\nThe sea\\nand \n")
    both = {"num_samples": 30, "openings": openings, "temperatures": (0.7, 1.0)}
    theirs, _ = write("hf", base=str(base), dtype="float32", batch_size=7, **both)
    ours, counts = write("engine", **both)
    assert ours == theirs and counts.written >= 10 and counts.skips["with a question above --max_question_tokens"]
    tokenizer = make_tokenizer()
    for row in ours:
        ids = [t for t, m in zip(row["token_ids"], row["loss_mask"]) if not m] if "token_ids" in row else None
        text = tokenizer.decode(ids) if ids else "<|user|>" + row["messages"][0]["content"]
        opening = ("Hello,", "", "The sea\nand ")[row["index"] // 2 % 3]
        assert text.startswith("<|user|>" + opening)


def test_a_run_that_was_killed_ends_as_one_that_was_not(write, tmp_path, monkeypatch):
    asked = {"num_samples": 24, "temperatures": (0.7, 1.0, 1.3)}
    whole, told = write("whole", **asked)
    step, left = EngineAuthor.step, [0]

    def killed(self):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(EngineAuthor, "step", killed)
    lengths = []
    for batch_size in (2, 5):
        left[0] = 30
        with pytest.raises(KeyboardInterrupt):
            write("killed", batch_size=batch_size, **asked)
        path = tmp_path / "killed.jsonl"
        lengths.append(len(rows(path)))
        path.write_bytes(path.read_bytes() + b'{"index": 23, "mess')  # in the middle of a line
    assert 0 < lengths[0] < lengths[1] < len(whole)
    left[0] = 10**9
    resumed, counts = write("killed", batch_size=3, **asked)
    assert resumed == whole
    assert (counts.written, counts.before, counts.skips) == (told.written, lengths[1], told.skips)


def test_shards_together_are_the_whole(write, questions):
    asked = {"prompts": questions, "temperatures": (0.7, 1.0)}
    whole, told = write("whole", **asked)
    parts = [write(f"shard-{n}", shard=(n, 3), **asked) for n in range(3)]
    assert sorted((row for part, _ in parts for row in part), key=lambda row: row["index"]) == whole
    assert all(row["index"] % 3 == n for n, (part, _) in enumerate(parts) for row in part)
    assert sum(counts.asked for _, counts in parts) == told.asked == 9


def test_rows_that_fail_are_counted_with_their_cause_and_made_by_a_later_run(write, questions, monkeypatch, capsys):
    whole, _ = write("whole", prompts=questions)
    prefill = Runner.prefill

    def broken(self, row, *rest):
        if row.num_prompt_tokens > 28:
            raise RuntimeError("the program broke")
        return prefill(self, row, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "prefill", broken)
        some, counts = write("out", prompts=questions)
    assert counts.failures == {"RuntimeError: the program broke": counts.failed} and 0 < counts.failed < 9
    assert f"failed {counts.failed} ({counts.failed} RuntimeError: the program broke)" in str(counts)
    assert capsys.readouterr().err.count("warning: row") == 1  # a cause is told once
    assert write("out", prompts=questions)[0] == whole and len(some) < len(whole)


def test_equal_rows_are_written_once_also_by_a_later_run(write, tmp_path):
    path = tmp_path / "same.jsonl"
    path.write_text('{"prompt": "River"}\n' * 5)
    for before in (0, 1):
        found, counts = write("out", prompts=str(path), temperatures=(0.0,))
        assert len(found) == counts.written == 1 and counts.before == before
        assert counts.skips == {"equal to an earlier row": 4}
    _, counts = write("out", prompts=str(path), temperatures=(1.0,), max_new_tokens=30)
    assert counts.written == 5  # sampled: each has noise of its own


def test_prompts_without_room_for_the_answer_are_skipped(write, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 90}) + '\n{"prompt": "River"}\n')
    _, counts = write(prompts=str(path), max_new_tokens=40)
    assert counts.skips == {"with a prompt that leaves no room for 40 tokens among 128": 1}
    with pytest.raises(ValueError, match=r"--max_new_tokens=128 leaves no room .* 128 tokens"):
        write(prompts=str(path), max_new_tokens=128)


def test_an_artifact_is_loaded_as_asked_and_that_of_another_base_is_refused(
    artifact, base, base_folder, write, tmp_path, monkeypatch
):
    asked = {"num_samples": 3, "strategy": "hispec", "artifact": artifact}
    shared, _ = write("shared", **asked)
    monkeypatch.undo()  # an LLM of its own
    assert write("own", base=str(base), dtype="float32", **asked)[0] == shared
    with pytest.raises(ValueError, match=r"was exported from .* whose config differs from that of the base"):
        write(base=str(base_folder), artifact=artifact, num_samples=1)
    with pytest.raises(ValueError, match=r"no hispec\.json there"):
        write(artifact=tmp_path, num_samples=1)
    with pytest.raises(ValueError, match="--batch_size=257: the artifact allows at most 256"):
        write(num_samples=1, batch_size=257)
