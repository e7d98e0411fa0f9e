"""What stands at the target is whole, before and after, whatever happens between."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from train.whole_folder import whole_folder


def fill(folder: Path, text: str) -> None:
    (folder / "file").write_text(text)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    fill(tmp_path / "target", "old")
    return tmp_path / "target"


def test_a_folder_replaces_what_was_there_and_leaves_nothing_else(target: Path) -> None:
    with whole_folder(target) as unfinished:
        fill(unfinished, "new")
        assert (target / "file").read_text() == "old"
    assert (target / "file").read_text() == "new"
    assert list(target.parent.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_what_was_written_privately_can_be_read_by_others_as_far_as_the_umask_lets_them(
    tmp_path: Path, umask: int, file: int, folder: int
) -> None:
    (tmp_path / "outside").touch(0o600)
    before = os.umask(umask)
    try:
        with whole_folder(tmp_path / "target") as unfinished:
            (unfinished / "weights").mkdir(0o700)
            save_file({"w": torch.zeros(1)}, unfinished / "weights" / "w.safetensors")
            shutil.copy(unfinished / "weights" / "w.safetensors", unfinished / "copy")
            (unfinished / "link").symlink_to(tmp_path / "outside")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    for name, mode in {"": folder, "weights": folder, "weights/w.safetensors": file, "copy": file}.items():
        assert (tmp_path / "target" / name).stat().st_mode & 0o777 == mode, name
    assert (tmp_path / "outside").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("where", ["block", "before_move"])
def test_an_error_keeps_what_was_there(target: Path, where: str) -> None:
    def refuse() -> None:
        raise ValueError("somebody else was quicker")

    with pytest.raises(ValueError), whole_folder(target, before_move=refuse) as unfinished:
        fill(unfinished, "new")
        if where == "block":
            raise ValueError("broke off")
    assert (target / "file").read_text() == "old"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(143)])
def test_what_was_moved_aside_comes_back_when_the_new_folder_cannot_be_moved(
    target: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    rename = os.rename

    def second_fails(source: Path, destination: Path) -> None:
        if destination == target and not str(source).endswith(".replaced"):
            raise error
        rename(source, destination)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(type(error)), whole_folder(target) as unfinished:
        fill(unfinished, "new")
    assert (target / "file").read_text() == "old"
    assert list(target.parent.iterdir()) == [target]
