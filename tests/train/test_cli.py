import json
import shutil

import pytest
import torch
import yaml

from train.cli import COMMANDS, main


@pytest.fixture
def config(base_folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"a{n}", "response": f"so {n}"}) + "\n" for n in range(6)))
    content = {
        "model": {
            "base": str(base_folder),
            "exits": [
                {"name": "draft", "layer": 2, "head": "linear"},
                {"name": "intermediate", "layer": 4, "head": "linear"},
            ],
        },
        "data": {"train_files": str(rows), "val_files": str(rows)},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "default_root_dir": str(tmp_path / "run"),
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_fit_twice_then_resume_and_validate(config, tmp_path, capsys):
    assert main(["fit", "--config", str(config)]) == 0
    assert main(["fit", "--config", str(config)]) == 0
    last = str(tmp_path / "run" / "last.ckpt")
    resumed = ["fit", "--config", str(config), "--ckpt_path", last, "--trainer.max_epochs", "2", "--model.lr", "0.5"]
    assert main(resumed) == 0
    assert main(["validate", "--config", str(config), "--ckpt_path", last]) == 0
    assert (tmp_path / "run" / "heads" / "exits.json").is_file()
    assert "acceptance_length" in capsys.readouterr().out


def test_fit_leaves_its_promise_with_the_heads_and_promise_writes_the_same(config, tmp_path, capsys):
    assert main(["fit", "--config", str(config)]) == 0
    heads = tmp_path / "run" / "heads"
    first = (heads / "validation.json").read_text()
    assert json.loads(first)["exits"] == ["draft", "intermediate"]
    (heads / "validation.json").unlink()
    assert main(["promise", "--config", str(config)]) == 2
    assert "model.warm_start is not set" in capsys.readouterr().err
    assert main(["promise", "--config", str(config), "--model.warm_start", str(heads)]) == 0
    assert (heads / "validation.json").read_text() == first
    assert "6 held-out rows, draft agreement" in capsys.readouterr().out


def test_lint_prints_counts_a_sample_and_whose_text_it_is_and_trains_nothing(config, tmp_path, capsys):
    assert main(["lint", "--config", str(config), "--data.max_length", "15"]) == 0
    out = capsys.readouterr().out
    assert "training: 6 rows, 6 used, 0 bad" in out and "held-out: 6 rows" in out and "6 cut at 15 tokens" in out
    assert "<|im_start|>assistant\n⟦so" in out and "first choice" in out
    assert not (tmp_path / "run").exists()
    assert main(["lint", "--config", str(config), "--data.max_lenght", "12"]) == 2
    assert "Did you mean data.max_length" in capsys.readouterr().err


def test_fit_prints_the_lint_first_and_bad_rows_stop_it(config, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() + '{"text": "a", "text": "b"}\n')
    assert main(["fit", "--config", str(config)]) == 2
    assert "rows.jsonl, line 7: the key 'text' stands twice" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["fit", "--config", str(config), "--data.on_bad_row", "skip", "--data.packing", "true"]) == 0
    out = capsys.readouterr().out
    assert "training: 7 rows, 6 used, 1 bad" in out and "bad: " in out


def test_lint_lists_every_bad_row_and_says_by_its_exit_code_that_fit_would_stop(config, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() + "{}\n" * 9)
    assert main(["lint", "--config", str(config)]) == 2
    assert "rows.jsonl, line 15: expected an object" in capsys.readouterr().out
    skip = ["--config", str(config), "--data.on_bad_row", "skip"]
    assert main(["lint", *skip]) == 0
    assert capsys.readouterr().out.count("  bad: ") == 18  # training and held-out are the same file
    assert main(["validate", *skip]) == 0
    assert "held-out: 15 rows, 6 used, 9 bad" in capsys.readouterr().out


def test_lint_lists_the_rows_also_where_fit_could_not_begin(config, base_folder, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() + json.dumps({"prompt": "a", "response": "so " * 200}) + "\n{}\n")
    base = shutil.copytree(base_folder, tmp_path / "short")
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 64}))
    assert main(["lint", "--config", str(config), "--model.base", str(base)]) == 2
    told = capsys.readouterr()
    assert "training: 8 rows, 7 used, 1 bad" in told.out and "line 8: expected an object" in told.out
    assert "has 64 positions" in told.err
    rows.write_text("{}\n" * 9)
    assert main(["lint", "--config", str(config)]) == 2
    told = capsys.readouterr()
    assert told.out.count("  bad: ") == 18 and "9 of 9 training rows can't be used" in told.err


def test_lint_takes_what_fit_takes_and_the_config_that_it_saved(config, tmp_path, capsys):
    assert main(["fit", "--config", str(config)]) == 0
    saved = tmp_path / "run" / "config.yaml"
    assert "ckpt_path" in yaml.safe_load(saved.read_text())
    assert main(["lint", "--config", str(saved), "--ckpt_path", "nowhere.ckpt"]) == 0
    assert "training: 6 rows, 6 used" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.lrr", "0.1"], ["lrr", "model.lr"]),
        (["--model.lr", "many"], ["lr", "many"]),
        (["--model.lr", "-1"], ["model.lr=-1"]),
        (["--model.exits", '[{"name": "draft", "layer": 99}]'], ["exits.draft.layer=99", "1 and 5"]),
        (["--model.exits", '[{"name": "draft", "layer": 0}]'], ["exits.draft.layer=0"]),
        (["--model.exits", '[{"name": "a", "layer": 4}, {"name": "b", "layer": 2}]'], ["exits.b.layer=2", "deeper"]),
        (["--model.exits", '[{"name": "draft", "layr": 1}]'], ["layr"]),
        (["--model.exits", '[{"name": "draft", "layer": 1, "head": "deep"}]'], ["head", "native", "deep"]),
        (["--model.exits", '[{"name": "draft", "layer": 1, "loss": {"kll": 1}}]'], ["kll"]),
        (["--model.exits", '[{"name": "draft", "layer": 1, "loss": {"tv": -1}}]'], ["exits.draft.loss.tv=-1"]),
        (["--trainer.devices", "two"], ["trainer", "two"]),
        (["--data.train_files", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--data.num_workers", "-1"], ["data.num_workers=-1"]),
        (["--ckpt_path", "nowhere.ckpt"], ["nowhere.ckpt"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(config, tmp_path, capsys, flags, words):
    assert main(["fit", "--config", str(config), *flags]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ") and all(word in line for word in words)
    assert not (tmp_path / "run" / "heads").exists()


@pytest.mark.parametrize("monitor", ["val/acceptance_length", "val/speedup", "val/draft/acceptance_rate_1"])
def test_training_stops_early_by_the_figure_that_serving_is_about(config, tmp_path, monitor):
    """At this learning rate nothing changes, so the second validation is no better than the first."""
    stopping = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": monitor, "mode": "max", "patience": 1},
    }
    flags = ["--trainer.callbacks", json.dumps([stopping]), "--trainer.max_epochs", "9", "--model.lr", "1e-12"]
    assert main(["fit", "--config", str(config), *flags]) == 0
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["epoch"] == 1


def test_a_loss_in_the_config_holds_and_adds_nothing_of_the_default(config, capsys):
    exits = (
        '[{"name": "draft", "layer": 1, "loss": {"tv": 0.5, "ce": 0.1, "temperature": 0.8}}, {"name": "b", "layer": 2}]'
    )
    assert main(["fit", "--config", str(config), "--model.exits", exits, "--print_config"]) == 0
    draft, deeper = yaml.safe_load(capsys.readouterr().out)["model"]["exits"]
    assert (draft["loss"]["tv"], draft["loss"]["ce"], draft["loss"]["temperature"]) == (0.5, 0.1, 0.8)
    assert draft["loss"]["kl"] == 0 and deeper["loss"] is None


def test_a_checkpoint_that_is_cut_short_or_runs_code_is_refused(config, tmp_path, capsys):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    whole, cut, evil = tmp_path / "whole.ckpt", tmp_path / "cut.ckpt", tmp_path / "evil.ckpt"
    torch.save({"state_dict": {}, "x": torch.zeros(1000)}, whole)
    cut.write_bytes(whole.read_bytes()[:2000])
    torch.save({"state_dict": {}, "x": Payload()}, evil)
    for path in (cut, evil):
        assert main(["fit", "--config", str(config), "--ckpt_path", str(path)]) == 2
        assert f"ckpt_path={path}" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_unknown_commands_and_tabs_in_yaml_are_told(tmp_path, capsys):
    assert main(["fitt"]) == 2
    bad = tmp_path / "tab.yaml"
    bad.write_text("model:\n\tbase: x\n")
    assert main(["fit", "--config", str(bad)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
