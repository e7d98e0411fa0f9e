"""Folders of ours on the Hugging Face hub: fetched under an id, pushed when a user asks for it.

An id is `owner/name`, or `owner/name@revision`. It stands for an artifact's folder in `LLM` and the commands of
`infer`, and for a folder heads/ in `export --checkpoint` and training's `warm_start`; elsewhere a folder is a path.
What is fetched becomes a plain folder in the user's cache, one for each commit, and whoever reads it checks it as any
other.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_OF_THE_HUB = frozenset({".gitattributes", "README.md"})  # the hub adds them; no loader of ours reads them
_OURS = frozenset({"hispec.json", "exits.json"})  # an artifact has the one, heads/ the other
_OFFLINE = "give a local folder, or check the name, the network and, for private ones, HF_TOKEN"
_NO_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"


def cache_root() -> Path:
    """Of what is made once for all runs; the user's own."""
    return Path(os.environ.get("HISPEC_CACHE") or "~/.cache/hispec").expanduser()


def is_fetched(folder: Path) -> bool:
    """Whether it lies among what `find_folder` has fetched, where nobody else may write."""
    return folder.resolve().is_relative_to((cache_root() / "hub").resolve())


def is_hub_id(name: str | os.PathLike[str]) -> bool:
    """Whether it can only be meant as one: `artifacts/mine` beside a folder `artifacts` is a path that is not there."""
    path = Path(name)
    return _ID.fullmatch(str(name)) is not None and not path.exists() and not Path(path.parts[0]).exists()


def find_folder(name: str | os.PathLike[str]) -> Path:
    """The folder that `name` is, or that it stands for on the hub; a path that is not there comes back as it is.

    Raises:
        ValueError: the hub can't be reached or has no such thing.
    """
    match = _ID.fullmatch(str(name))
    if match is None or not is_hub_id(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        with _refusals(str(name), _OFFLINE):
            snapshot = Path(snapshot_download(match["repo"], revision=match["revision"]))
    except OSError as error:  # as httpx's and the hub's own that are none of its refusals
        raise ValueError(f"{name}: neither a folder, nor could the hub give it ({error}): {_OFFLINE}") from error
    folder = cache_root() / "hub" / match["repo"].replace("/", "--") / snapshot.name
    if not folder.exists():
        _copy(snapshot, folder)
    return folder


def check_login(repo: str) -> None:
    """Asked before the work: ValueError unless `repo` is an id, without revision, somebody is logged in, and the
    repository is new, empty, or holds what was pushed before: `push_folder` takes away what else is there."""
    match = _ID.fullmatch(repo)
    if match is None or match["revision"] is not None:
        raise ValueError(f"{repo!r} is no hub id: give OWNER/NAME")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    with _refusals(repo, _NO_LOGIN):
        api.whoami()
        try:
            names = set(api.list_repo_files(repo))
        except RepositoryNotFoundError:  # `push_folder` will make it
            return
    if (others := sorted(names - _OF_THE_HUB)) and not names & _OURS:
        raise ValueError(
            f"{repo} on the hub holds {others[0]!r} and no {' or '.join(sorted(_OURS))}: it is none of ours, and a "
            "push would delete what is there. Give the OWNER/NAME of a new repository, or empty that one first"
        )


def push_folder(folder: Path, repo: str, card: str, message: str) -> str:
    """Make `repo` (public, if it is new) hold what `folder` holds and `card` as its README.md; the hub's address of it.

    What else is there goes, as a reader would refuse files that no record knows: ask `check_login` before.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _refusals(repo, _NO_LOGIN):
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=message,
            delete_patterns=["*"],
            ignore_patterns=["README.md"],
        )
        api.upload_file(
            repo_id=repo, path_or_fileobj=card.encode(), path_in_repo="README.md", commit_message=f"{message}: card"
        )
    return str(address)


@contextmanager
def _refusals(name: str, remedy: str) -> Iterator[None]:
    """What the hub or the way to it refuses becomes a ValueError."""
    import httpx
    from huggingface_hub import errors

    kinds = (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        errors.LocalTokenNotFoundError,
        errors.RevisionResolutionError,
        httpx.HTTPError,
    )
    try:
        yield
    except kinds as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{name}: the hub could not be used ({reason}): {remedy}") from error


def _copy(snapshot: Path, folder: Path) -> None:
    """A snapshot, whose files are links into the hub's cache, as a folder of plain files; it appears whole."""
    store = snapshot.parents[1].resolve()  # models--owner--name, with blobs/ and snapshots/
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for parent, _, names in os.walk(snapshot):
            for source in (Path(parent, name) for name in names):
                relative, content = source.relative_to(snapshot), source.resolve()
                if str(relative) in _OF_THE_HUB:
                    continue
                if not content.is_relative_to(store) or not content.is_file():
                    raise ValueError(f"{source}: leads to {content}, expected a file within {store}")
                target = unfinished / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(content, target)
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same commit
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
