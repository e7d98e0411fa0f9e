"""The loop of `train generate` with an author of canned texts: it is kept full, and every row is accounted for."""

import pytest

from tests.train.conftest import END, TEMPLATE, make_tokenizer
from train.author import Written
from train.formats import Encoder
from train.generate_options import GenerateOptions, parse_options
from train.prompts import Prompt, read_openings
from train.row_texts import RowTexts, digest
from train.writing import Writing

PLAIN = [40, 41]  # an answer, with the row's number before it


class Canned:
    """A task takes as many steps as `steps` says for its row; `tails` says what is written, or which error."""

    max_model_len = 400

    def __init__(self, steps=lambda n: 1, tails=lambda task: [100 + task.prompt.number, *PLAIN, END]):
        self.steps, self.tails = steps, tails
        self.left, self.given, self.in_flight = {}, [], []

    @property
    def num_tasks(self):
        return len(self.left)

    def add(self, task):
        self.given.append(task)
        self.left[id(task)] = [task, self.steps(task.prompt.number)]

    def step(self):
        self.in_flight.append(sorted(task.prompt.number for task, _ in self.left.values()))
        for entry in self.left.values():
            entry[1] -= 1
        ended = [task for task, left in self.left.values() if left <= 0]
        for task in ended:
            del self.left[id(task)]
        tails = [(task, self.tails(task)) for task in ended]
        return [Written(task, [], tail) if isinstance(tail, str) else Written(task, tail) for task, tail in tails]


def texts(template=TEMPLATE):
    return RowTexts(Encoder(make_tokenizer(template), [END], 320))


def run(author, waiting, chat=None, seen=(), **changes):
    options = GenerateOptions(**({"base": "b", "output": "o", "prompts": "p", "batch_size": 3} | changes))
    writing = Writing(options, chat or texts(), author, set(seen))
    steps = list(writing.rows(waiting))
    writing.counts.asked = len(waiting)
    return steps, writing.counts


def asked(count):
    return [Prompt(n, messages=({"role": "user", "content": f"The snow {n}"},)) for n in range(count)]


def test_a_row_that_ends_makes_place_at_once_and_is_written_before_longer_ones():
    author = Canned(steps=lambda n: 5 if n == 0 else 1)
    steps, counts = run(author, asked(8))
    assert author.in_flight == [[0, 1, 2], [0, 3, 4], [0, 5, 6], [0, 7], [0]]
    assert [[row["index"] for row in rows] for rows in steps] == [[1, 2], [3, 4], [5, 6], [7], [0]]
    assert counts.written == 8 and counts.tokens == 8 * 4


def test_seed_and_temperature_are_the_rows_own():
    def told(batch_size, **changes):
        author = Canned()
        run(author, asked(9), batch_size=batch_size, temperatures=(0.0, 0.5, 1.0), **changes)
        return {t.prompt.number: (t.params.temperature, t.params.seed) for t in author.given}

    found = told(1)
    assert [found[n][0] for n in range(9)] == [0.0, 0.5, 1.0] * 3
    assert len({seed for _, seed in found.values()}) == 9
    assert told(4) == found != told(4, seed=1)


def test_a_question_is_asked_first_with_a_seed_of_its_own():
    opened, chat = "The snow is", texts()

    def tails(task):
        text = " so slow" if not task.prompt.messages else "now"
        return [*chat.tokenizer(text)["input_ids"], END]

    author = Canned(tails=tails)
    steps, counts = run(author, [Prompt(0, text=opened)], prompts=None, num_samples=1, temperatures=(0.3,))
    question, answer = author.given
    assert chat.tokenizer.decode(question.head) == "<|im_start|>user\nThe snow is"
    assert (question.params.temperature, answer.params.temperature) == (1.0, 0.3)
    assert (question.params.max_tokens, answer.params.max_tokens) == (128, 256)
    assert question.params.seed != answer.params.seed
    (row,) = steps[-1]
    assert row["messages"][0]["content"] == "The snow is so slow" and counts.written == 1


def test_what_becomes_of_every_row_is_told_with_its_reason():
    def tails(task):
        number = task.prompt.number
        if not task.prompt.messages:
            return {0: [END], 1: [*PLAIN], 2: "OutOfMemoryError: no memory"}.get(number, [70 + number, END])
        return {3: [END], 4: "OutOfMemoryError: no memory"}.get(number, [90, END])

    alike = [Prompt(n) for n in range(6)] + [Prompt(6, messages=({"role": "user", "content": "x" * 90},))]
    alike += [Prompt(n, messages=({"role": "user", "content": "same"},)) for n in (7, 8)]
    _, counts = run(Canned(tails=tails), alike, max_prompt_tokens=60, max_new_tokens=100, max_question_tokens=100)
    assert counts.skips == {
        "with an empty question": 1,
        "with a question above --max_question_tokens": 1,
        "with an empty answer": 1,
        "with a prompt above --max_prompt_tokens": 1,
        "equal to an earlier row": 1,
    }
    assert counts.failures == {"OutOfMemoryError: no memory": 2}
    assert counts.written + counts.failed + counts.skipped == counts.asked == 9
    assert "failed 2 (2 OutOfMemoryError: no memory), skipped 5 (1 with" in str(counts)


def test_a_template_that_refuses_fails_its_row_alone(monkeypatch, capsys):
    chat = texts()
    prompt_ids = chat.prompt_ids

    def refuse(prompt):
        if prompt.number == 1:
            raise ValueError("the chat template refuses the messages")
        return prompt_ids(prompt)

    monkeypatch.setattr(chat, "prompt_ids", refuse)
    _, counts = run(Canned(), asked(3), chat)
    assert counts.failures == {"the chat template refuses the messages": 1} and counts.written == 2
    assert "warning: row 1 failed: the chat template refuses" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["So slow", "\ud83d\ude42".encode("utf-16", "surrogatepass").decode("utf-16")])
@pytest.mark.parametrize("is_ended", [True, False])
def test_a_written_row_has_the_digest_of_its_tokens(answer, is_ended):
    chat = texts()
    (prompt,) = asked(1)
    head = chat.prompt_ids(prompt)
    tail = chat.tokenizer(answer)["input_ids"] + [END] * is_ended
    row = chat.row(prompt, head, tail)
    assert "messages" in row
    as_ids = {"index": 5, "token_ids": [*head, *tail], "loss_mask": [0] * len(head) + [1] * len(tail)}
    assert chat.digest_of(row) == chat.digest_of(as_ids) == digest([*head, *tail]) != digest([*head, *tail, 5])


def test_rows_that_the_file_holds_already_are_skipped():
    (prompt,) = asked(1)
    head = texts().prompt_ids(prompt)
    _, counts = run(Canned(), [prompt], seen=[digest([*head, 100, *PLAIN, END])])
    assert counts.skips == {"equal to an earlier row": 1}


def test_without_a_template_an_opening_is_the_head_of_the_text():
    author = Canned()
    ((row,),), _ = run(author, [Prompt(0, text="The snow")], chat=texts(None), prompts=None, num_samples=1)
    assert author.given[0].head == make_tokenizer()("The snow")["input_ids"] == row["token_ids"][:-4]


def test_openings_are_lines_with_breaks_and_none(tmp_path):
    path = tmp_path / "openings.txt"
    path.write_text("What is \n\n  \n-\nA\\nB\n", encoding="utf-8")
    assert read_openings(path) == ["What is ", "", "A\nB"]
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no opening"):
        read_openings(path)
    with pytest.raises(ValueError, match=r"--openings .*none\.txt: can't be read"):
        read_openings(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "give --config FILE .*, --base NAME or --artifact DIR"),
        (["--base", "b", "--strategy", "hispec"], "--strategy=hispec is the engine's"),
        (["--artifact", "a", "--revision", "r"], "--revision=r is the base's"),
        (["--base", "b", "--shard", "2/2"], r"--shard=2/2 must be I/N with 0 <= I < N"),
        (["--base", "b", "--shard", "1"], r"--shard: '1' must be I/N"),
        (["--base", "b", "--prompts", "p", "--openings", "o"], "--openings begin what the base asks itself"),
        (["--base", "b", "--max_question_tokens", "0"], "--max_question_tokens=0 must be at least 1"),
    ],
)
def test_options_that_contradict_each_other_are_refused(argv, reason):
    with pytest.raises(ValueError, match=reason):
        parse_options(["--output", "o", "--num_samples", "1", *argv])


def test_the_revision_of_a_config_goes_with_its_own_base(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("model: {base: owner/name, revision: abc, exits: []}\n")
    argv = ["--output", "o", "--num_samples", "1", "--config", str(config)]
    assert parse_options(argv).revision == "abc"
    assert parse_options([*argv, "--base", "other/name"]).revision is None
