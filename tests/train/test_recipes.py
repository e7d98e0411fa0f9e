"""Every recipe of configs/ parses, explains its keys, states what it needs, and runs on a tiny base of its family."""

import contextlib
import functools
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from export.cli import _parser, load_model, read_source
from tests.train.conftest import save_base
from tests.train.published_configs import PUBLISHED, published_config
from train.cli import main
from train.estimate import estimate, workload
from train.generate import parse_options

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
NATIVE = [path for path in CONFIGS if path.stem.startswith("layerskip-")]  # nothing is trained
LAYERSKIP = [path for path in CONFIGS if path.stem.endswith("-layerskip")]  # the base is, and native exits come of it
TRAINED = [path for path in CONFIGS if path not in NATIVE]
TINY_LAYERS = 6


@functools.cache
def parsed(path):
    """The whole config that results."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["fit", "--config", str(path), "--print_config"]) == 0
    return yaml.safe_load(out.getvalue())


@pytest.fixture(scope="session")
def bases(tmp_path_factory, tiny_model, base_folder, plain_folder):
    """model_type → a tiny base of that family."""
    qwen3 = save_base(tmp_path_factory.mktemp("base") / "qwen3", tiny_model, "qwen3")
    return {"llama": base_folder, "opt": plain_folder, "qwen3": qwen3}


@pytest.fixture
def flags(bases, tmp_path):
    """Options that put a recipe on a tiny base, with tiny text, for one step."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"a{n}", "response": f"so {n}"}) + "\n" for n in range(2)))
    trainer = {
        "accelerator": "cpu",
        "max_steps": 1,
        "limit_val_batches": 1,
        "logger": "false",
        "enable_progress_bar": "false",
        "enable_model_summary": "false",
        "default_root_dir": str(tmp_path / "run"),
    }

    def make(path):
        model = parsed(path)["model"]
        options = {
            "--model.base": str(bases[PUBLISHED[model["base"]]["model_type"]]),
            "--model.exits": json.dumps(tiny_exits(model)),
            "--model.warm_start": "null",
            "--data.train_files": str(rows),
            "--data.val_files": str(rows),
            **{f"--trainer.{key}": str(value) for key, value in trainer.items()},
        }
        return ["--config", str(path), *(word for option in options.items() for word in option)]

    return make


def tiny_exits(model):
    """The recipe's exits at the same share of the depth, in the same order, over fewer ids."""
    num_layers, below, exits = PUBLISHED[model["base"]]["num_hidden_layers"], 0, []
    for exit_ in model["exits"]:
        below = max(below + 1, round(exit_["layer"] * TINY_LAYERS / num_layers))
        exits.append(exit_ | {"layer": below, "vocab_size": exit_["vocab_size"] and 64})
    return exits


def test_there_is_a_recipe_for_every_base():
    assert {parsed(path)["model"]["base"] for path in CONFIGS} == set(PUBLISHED)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_recipe_parses_and_every_key_has_a_comment(path):
    config = parsed(path)
    assert [e["name"] for e in config["model"]["exits"]] == ["draft", "intermediate"]
    assert config["trainer"]["default_root_dir"] == f"runs/{path.stem}"
    seen = set()
    for line in path.read_text().splitlines():
        key, _, rest = line.strip().lstrip("- ").partition(":")
        if key.isidentifier() and rest.strip() and "#" not in line:
            assert key in seen, f"{path.name}: {key} has no comment"
        seen.add(key)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_exits_are_low_and_large_vocabularies_trimmed(path):
    config = parsed(path)
    published = PUBLISHED[config["model"]["base"]]
    draft, intermediate = config["model"]["exits"]
    num_layers = published["num_hidden_layers"]
    assert draft["layer"] <= max(2, num_layers / 8) + 0.5 and abs(intermediate["layer"] / num_layers - 1 / 3) < 0.1
    for exit_ in (draft, intermediate):
        assert (exit_["head"] == "native") == (path in NATIVE + LAYERSKIP)
        assert exit_["head"] == "native" or exit_["vocab_size"] <= published["vocab_size"] // 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_recipe_states_what_the_estimate_says_and_its_own_commands(path):
    config, text = parsed(path), " ".join(line.strip("# ") for line in path.read_text().splitlines())
    stated = re.search(r"Needs\s+(peak memory .* at ([\d.]+) TFLOP/s)", text)
    assert stated, f"{path.name}: no line `Needs`"
    on_cpu = re.search(r"Runs\s+on a CPU", text) is not None
    expected = estimate(published_config(config["model"]["base"]), workload(config)).line(float(stated[2]), on_cpu)
    assert re.split(r"[\d.]+", stated[1]) == re.split(r"[\d.]+", expected), f"state: {expected}"
    # Another torch or transformers may keep another tensor
    numbers = [[float(n) for n in re.findall(r"\d[\d.]*\b", line)] for line in (stated[1], expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.03, abs=0.011), f"state: {expected}"
    assert set(re.findall(r"configs/([\w.-]+)\.yaml", text)) == {path.stem}
    assert set(re.findall(r"(?:runs|artifacts)/([\w.-]+?)(?:/|\s)", text)) == {path.stem}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_commands_that_a_recipe_states_parse(path):
    text = path.read_text().replace("\\\n#", "")
    commands = [shlex.split(line) for line in re.findall(r"^#   python -m (.*)$", text, flags=re.MULTILINE)]
    names = [" ".join(command[:2]) for command in commands]
    assert ("train validate" if path in NATIVE else "train fit") in names
    for package, *arguments in commands:
        if package == "export":
            _parser().parse_args(arguments)
        elif arguments[0] == "generate":
            options = parse_options(arguments[1:])
            assert str(options.output) in yaml.safe_load(path.read_text())["data"]["train_files"]
        else:
            assert arguments[1:] == ["--config", f"configs/{path.name}"]


@pytest.mark.parametrize("path", TRAINED, ids=lambda p: p.stem)
def test_a_recipe_trains(path, flags, tmp_path, capsys):
    assert main(["fit", *flags(path)]) == 0
    assert "estimate: peak memory" in capsys.readouterr().out
    stored = json.loads((tmp_path / "run" / "heads" / "exits.json").read_text())["exits"]
    assert [{k: e[k] for k in stored[0]} for e in tiny_exits(parsed(path)["model"])] == stored
    assert (tmp_path / "run" / "last.ckpt").is_file()
    part = {"lora": "adapter", "full": "base"}.get(parsed(path)["model"]["backbone"])
    assert part is None or (tmp_path / "run" / "heads" / part).is_dir()


@pytest.mark.parametrize("path", NATIVE, ids=lambda p: p.stem)
def test_a_recipe_of_native_exits_is_measured_and_exported_as_it_is(path, flags, bases, tmp_path, capsys):
    assert main(["validate", *flags(path)]) == 0
    assert "acceptance_length" in capsys.readouterr().out
    source = read_source(None, path)
    assert source.base == parsed(path)["model"]["base"] and source.heads is None
    content = yaml.safe_load(path.read_text())
    content["model"] |= {"base": str(bases["llama"]), "exits": tiny_exits(parsed(path)["model"])}
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text(yaml.safe_dump(content))
    assert not load_model(read_source(None, tiny), "float32").trainable_parameters()


def test_training_native_exits_says_what_to_do_instead(flags, capsys):
    assert main(["fit", *flags(NATIVE[0])]) == 2
    assert "Use `validate`, and `export --config`" in capsys.readouterr().err
