import pytest

from train.config_file import model_section


def test_a_config_gives_its_section_model_or_is_told_with_its_name(tmp_path):
    path = tmp_path / "a.yaml"
    with pytest.raises(ValueError, match=r"--config .*a\.yaml: no such file"):
        model_section(path)
    for content, reason in (
        (b"model:\n\tbase: x\n", "not YAML"),
        (b"model: {base: \xe4}\n", "not YAML"),
        (b"[]", r"model\.base is missing"),
        (b"model: {exits: []}\n", r"model\.base is missing"),
        (b"model: {base: 7}\n", r"model\.base is missing"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"--config .*a\.yaml: {reason}"):
            model_section(path)
    path.write_text("model: {base: x, revision: y}\n")
    assert model_section(path) == {"base": "x", "revision": "y"}
