"""Ids of the hub in the place of folders, against a hub that is faked as it lies on disk: nothing is reached here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, LocalTokenNotFoundError, RepositoryNotFoundError

from infer.artifact import Artifact
from infer.cli import main
from infer.hub import check_login, find_folder, is_hub_id, push_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories in memory; `snapshot_download` leaves links into blobs/, as the hub's cache does."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.files = cache, dict[str, dict[str, bytes]]()
        self.asked = list[tuple[str, str | None]]()

    def snapshot_download(self, repo_id: str, revision: str | None = None) -> str:
        self.asked.append((repo_id, revision))
        if repo_id not in self.files:
            raise LocalEntryNotFoundError("cannot find the requested files")
        store = self.cache / f"models--{repo_id.replace('/', '--')}"
        snapshot = store / "snapshots" / COMMIT
        shutil.rmtree(store, ignore_errors=True)
        (store / "blobs").mkdir(parents=True)
        for number, (name, content) in enumerate(self.files[repo_id].items()):
            (store / "blobs" / str(number)).write_bytes(content)
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(store / "blobs" / str(number))
        return str(snapshot)

    # ---- HfApi ----

    def whoami(self) -> dict[str, str]:
        return {"name": "me"}

    def list_repo_files(self, repo_id: str) -> list[str]:
        if repo_id not in self.files:
            raise RepositoryNotFoundError(
                "404", response=httpx.Response(404, request=httpx.Request("GET", "http://hub"))
            )
        return list(self.files[repo_id])

    def create_repo(self, repo_id: str, exist_ok: bool) -> str:
        assert exist_ok
        self.files.setdefault(repo_id, {".gitattributes": b"*.pt2 filter=lfs"})
        return f"https://hub/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str, **patterns: Any) -> None:
        assert patterns == {"delete_patterns": ["*"], "ignore_patterns": ["README.md"]}
        kept = {name: content for name, content in self.files[repo_id].items() if name == ".gitattributes"}
        found = {p.relative_to(folder_path).as_posix(): p.read_bytes() for p in folder_path.rglob("*") if p.is_file()}
        self.files[repo_id] = kept | {name: content for name, content in found.items() if name != "README.md"}

    def upload_file(self, *, repo_id: str, path_or_fileobj: bytes, path_in_repo: str, commit_message: str) -> None:
        self.files[repo_id][path_in_repo] = path_or_fileobj


@pytest.fixture
def hub(tmp_path: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(tmp_path / "hf")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return fake


def test_an_artifact_that_was_pushed_opens_under_its_id(hub: Hub, artifact: Path, tmp_cache: Path) -> None:
    assert push_folder(artifact, "me/mine", "# card", "made") == "https://hub/me/mine"
    assert hub.files["me/mine"]["README.md"] == b"# card"
    opened = Artifact.open("me/mine@v1")
    assert hub.asked == [("me/mine", "v1")]
    assert (
        opened.path == tmp_cache / "hub" / "me--mine" / COMMIT and opened.manifest == Artifact.open(artifact).manifest
    )
    assert not any(path.is_symlink() for path in opened.path.rglob("*"))
    (opened.path / "plan.json").write_text("{}")
    assert Artifact.open("me/mine").path == opened.path, "what was made of this commit stays, a plan too"
    assert (opened.path / "plan.json").exists()


def test_pushing_again_takes_away_what_is_no_longer_there(hub: Hub, artifact: Path) -> None:
    push_folder(artifact, "me/mine", "# card", "made")
    hub.files["me/mine"]["programs/old/unembed.pt2"] = b"old"
    push_folder(artifact, "me/mine", "# card", "made")
    assert Artifact.open("me/mine").manifest.files.keys() <= hub.files["me/mine"].keys()


def test_what_the_hub_gives_is_checked_as_a_folder_is(hub: Hub, artifact: Path) -> None:
    push_folder(artifact, "me/mine", "# card", "made")
    whole = dict(hub.files["me/mine"])
    hub.files["me/cut"] = whole | {"config.json": whole["config.json"][:-1] + b" "}
    with pytest.raises(ValueError, match=r"config\.json has sha256"):
        Artifact.open("me/cut")
    hub.files["me/more"] = whole | {"evil.so": b"code"}
    with pytest.raises(ValueError, match=r"evil\.so has no record"):
        Artifact.open("me/more")
    hub.files["me/none"] = {".gitattributes": b"", "README.md": b"", "x": b""}
    with pytest.raises(ValueError, match=r"hispec\.json is missing"):
        Artifact.open("me/none")


def test_a_link_that_leads_out_of_the_hubs_cache_is_refused(
    hub: Hub, artifact: Path, tmp_path: Path, tmp_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_folder(artifact, "me/mine", "# card", "made")
    snapshot = Path(hub.snapshot_download("me/mine"))
    (tmp_path / "secret").write_text("mine")
    (snapshot / "secret").symlink_to(tmp_path / "secret")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, revision: str(snapshot))
    with pytest.raises(ValueError, match="expected a file within"):
        find_folder("me/mine")
    assert list((tmp_cache / "hub" / "me--mine").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("me/mine", True), ("me/mine@main", True), ("me/mine@refs/pr/1", True), ("mine", False), ("./mine", False),
        ("/a/b", False), ("~/mine", False), ("a/b/c", False), ("../a", False), ("me/mine@", False), ("here/x", False),
    ],
)  # fmt: skip
def test_paths_are_told_from_ids(
    name: str, is_id: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert is_hub_id(name) == is_id
    if not is_id:
        assert main(["inspect", name]) == 2
        assert "no such folder" in capsys.readouterr().err


def test_an_id_that_the_hub_does_not_give_is_one_line(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "me/none"]) == 2
    error = capsys.readouterr().err
    assert "me/none: the hub could not be used" in error and "give a local folder" in error


@pytest.mark.parametrize("error", [LocalTokenNotFoundError("no token"), httpx.ConnectError("no route")])
def test_a_push_without_a_login_or_a_way_is_told_before_the_work(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse() -> None:
        raise error

    check_login("me/mine")
    monkeypatch.setattr(hub, "whoami", refuse)
    with pytest.raises(ValueError, match=rf"{error}.*hf auth login"):
        check_login("me/mine")
    for wrong in ("mine", "me/mine@v1", "a/b/c"):
        with pytest.raises(ValueError, match="OWNER/NAME"):
            check_login(wrong)


@pytest.mark.parametrize(
    ("names", "is_ours"),
    [
        ([], True), ([".gitattributes", "README.md"], True), (["hispec.json", "config.json"], True),
        (["exits.json", "heads.safetensors"], True), (["README.md", "model.safetensors"], False),
        (["config.json", "old/hispec.json"], False),
    ],
)  # fmt: skip
def test_a_repository_that_holds_something_else_is_never_pushed_to(hub: Hub, names: list[str], is_ours: bool) -> None:
    hub.files["me/mine"] = dict.fromkeys(names, b"")
    if is_ours:
        check_login("me/mine")
        return
    with pytest.raises(ValueError, match=r"me/mine on the hub holds '\w+\.\w+' .*OWNER/NAME of a new repository"):
        check_login("me/mine")


def test_nobody_is_told_to_write_into_what_was_fetched(hub: Hub, artifact: Path) -> None:
    push_folder(artifact, "me/mine", "# card", "made")
    for opened, output in ((Artifact.open("me/mine"), "DIR"), (Artifact.open(artifact), str(artifact))):
        with pytest.raises(ValueError, match="Build them here") as caught:
            opened.select("tensorrt")
        assert f"--output {output} --backend tensorrt" in str(caught.value)
