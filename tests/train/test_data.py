import json

import pytest
import torch

from tests.train.conftest import END, save_base
from train.batches import collate
from train.data import DistillationDataModule


def write(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def module(folder, rows, tmp_path, val=None, **options):
    val = val or [chat("so", "now")]
    train, held_out = write(tmp_path / "train.jsonl", rows), write(tmp_path / "val.jsonl", val)
    return DistillationDataModule(train, held_out, base=str(folder), **options)


def test_the_real_eos_is_a_label_and_padding_with_the_same_id_is_none(base_folder, tmp_path):
    data = module(base_folder, [chat("a", "so"), chat("a", "The snow is so slow now")], tmp_path)
    data.setup("fit")
    batch = collate(data.train_rows)
    for row, encoded in enumerate(data.train_rows):
        length = len(encoded.token_ids)
        assert not batch.loss_mask[row, length:].any()
        assert batch.token_ids[row][batch.loss_mask[row]].tolist()[-1] == END


def test_train_files_may_be_a_list_with_patterns(base_folder, tmp_path):
    for n in range(3):
        write(tmp_path / f"shard-{n}.jsonl", [chat(f"so {n}", "now")] * (n + 1))
    held_out = write(tmp_path / "val.jsonl", [chat("so", "now")])
    files = [str(tmp_path / "shard-[01].jsonl"), str(tmp_path / "shard-2.jsonl")]
    data = DistillationDataModule(files, held_out, base=str(base_folder))
    data.setup("fit")
    assert len(data.train_rows) == 6
    with pytest.raises(ValueError, match="no file matches"):
        DistillationDataModule(str(tmp_path / "part-*.jsonl"), held_out, base=str(base_folder)).setup("fit")


def test_rows_whose_answer_is_cut_away_are_dropped_with_a_count(base_folder, tmp_path):
    rows = [chat("x" * 60, "so")] + [chat("a", "now")] * 7
    data = module(base_folder, rows, tmp_path, max_length=40)
    data.setup("fit")
    assert len(data.train_rows) == 7 and "8 rows, 7 used, 0 bad, 1 without a label" in str(data.lints[0])


def test_when_no_label_is_left_anywhere_the_error_says_so(base_folder, tmp_path):
    data = module(base_folder, [chat("x" * 60, "so")] * 8, tmp_path, max_length=40)
    with pytest.raises(ValueError, match=r"no training row carries a label: 8 read, 8 without.*max_length=40"):
        data.setup("fit")


def test_rows_longer_than_the_bases_positions_are_refused(tmp_path, tiny_model):
    folder = save_base(tmp_path / "short", tiny_model, "llama", max_position_embeddings=16)
    with pytest.raises(ValueError, match=r"max_length=512 leaves a training row of \d+ tokens.* has 16 positions"):
        module(folder, [chat("a" * 9, "b")], tmp_path).setup("fit")
    cut = module(folder, [chat("a", "b" * 20)], tmp_path, val=[{"text": "so slow"}], max_length=16)
    cut.setup("fit")
    assert len(cut.train_rows[0].token_ids) == 16


BAD = [
    ("{broken", "not JSON"),
    ([1], "expected an object"),
    ({}, "expected an object"),
    ({"message": 1}, "has only message"),
    ({"text": ""}, "text must be"),
    ({"prompt": "a"}, "response must be"),
    ({"messages": []}, "non-empty"),
    ({"token_ids": [1, 2], "loss_mask": [1]}, "same length"),
    ({"token_ids": [1, 999], "loss_mask": [0, 1]}, r"token_ids\[1\]=999"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_a_bad_row_is_told_with_file_row_and_reason(base_folder, tmp_path, row, reason):
    data = module(base_folder, [chat("a", "b"), "", row], tmp_path)
    with pytest.raises(ValueError, match=rf"1 of 2 training rows.*train.jsonl, line 3: .*{reason}"):
        data.setup("fit")


def test_bad_rows_can_be_skipped_and_are_counted(base_folder, tmp_path):
    rows = [chat("a", "b"), *(row for row, _ in BAD)]
    data = module(base_folder, rows, tmp_path, on_bad_row="skip")
    data.setup("fit")
    assert len(data.train_rows) == 1 and f"{len(rows)} rows, 1 used, {len(BAD)} bad" in str(data.lints[0])


def test_when_all_rows_are_bad_the_reasons_are_named_also_with_skip(base_folder, tmp_path):
    for on_bad_row in ("skip", "fail"):
        data = module(base_folder, [row for row, _ in BAD], tmp_path, on_bad_row=on_bad_row)
        with pytest.raises(ValueError, match=r"9 of 9 .*line 1: not JSON.*line 5: .*; …\. Mend them; `python"):
            data.setup("fit")


def test_all_file_kinds_give_the_same_rows(base_folder, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "so", "response": f"now {n}"} for n in range(3)]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = []
    for suffix in ("jsonl", "json", "parquet"):
        data = DistillationDataModule(str(tmp_path / f"a.{suffix}"), str(tmp_path / "a.json"), base=str(base_folder))
        data.setup("fit")
        found.append(data.train_rows)
    assert found[0] == found[1] == found[2] and len(found[0]) == 3


def test_text_of_a_base_without_template_carries_loss_after_its_first_token(plain_folder, tmp_path):
    data = module(plain_folder, [{"text": "The snow"}], tmp_path, val=[{"text": "so slow"}])
    data.setup("fit")
    assert all(data.train_rows[0].loss_mask)
    assert collate(data.train_rows).loss_mask[0].tolist() == [False] + [True] * (len(data.train_rows[0].token_ids) - 1)
    with pytest.raises(ValueError, match="no chat template"):
        module(plain_folder, [chat("a", "b")], tmp_path).setup("fit")


def test_held_out_rows_are_the_same_in_every_run_and_not_trained_on(base_folder, tmp_path):
    file = write(tmp_path / "a.jsonl", [chat("so", f"now {n}") for n in range(40)])
    first, second = (DistillationDataModule(file, base=str(base_folder), val_fraction=0.3) for _ in range(2))
    first.setup("fit")
    second.setup("fit")
    assert first.val_rows == second.val_rows
    assert len(first.val_rows) + len(first.train_rows) == 40
    assert not {tuple(r.token_ids) for r in first.val_rows} & {tuple(r.token_ids) for r in first.train_rows}


def test_label_counts_count_labels_only(base_folder, tmp_path):
    data = module(base_folder, [chat("so", "so")], tmp_path)
    data.setup("fit")
    counts = data.label_counts(320)
    assert counts.dtype == torch.int64 and int(counts.sum()) == data.train_rows[0].num_labels and int(counts[END]) == 1


def test_batches_come_in_few_lengths_and_never_beyond_the_bases_positions(tmp_path, tiny_model):
    rows = [chat("a", "so " * n) for n in range(1, 28)]
    base = save_base(tmp_path / "base", tiny_model, "llama", max_position_embeddings=60)
    data = module(base, rows, tmp_path, batch_size=1)
    data.setup("fit")
    lengths = [batch.token_ids.shape[1] for batch in data.train_dataloader()]
    assert len(lengths) == 27 and set(lengths) == {32, 60}
    assert sum(int(batch.loss_mask.sum()) for batch in data.train_dataloader()) == data.label_counts(320).sum()
