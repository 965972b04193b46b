"""Publish a release to a data set of the Hugging Face Hub: one commit, one tag.

The repository holds one release on its main branch, the latest; older ones are its tags, `v<version>`. The
commit is made on top of the one that was looked at (`parent_commit`), so of two publishers the second is
sent back to look again. Its title says which release it is, by name, version and digest: killed before the
tag, publishing finds its commit again and only tags; another release under the same version is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradeloom.schemas.errors import InputError
from gradeloom.tasks.release.catalog import MANIFEST, free_version, order
from gradeloom.tasks.release.publish import Bundle, Published, Report
from gradeloom.tasks.release.remote import (
    HUB,
    Place,
    asking,
    compare,
    open_place,
    read_remote_manifest,
)

_TITLE = re.compile(r"Release (?P<name>\S+) (?P<version>\S+) \(digest (?P<digest>[0-9a-f]{64})\)")
_LOOKS = 5
"""How often to look again when somebody else's commit came first."""


@dataclass(frozen=True)
class _State:
    """What the repository says.

    Attributes:
        head: the commit of its main branch.
        tags: tag -> commit.
        commits: version -> (commit, digest), of this release's name.
    """

    head: str
    tags: dict[str, str]
    commits: dict[str, tuple[str, str]]

    def taken(self, version: str) -> bool:
        return version in self.commits or _tag(version) in self.tags


def publish(
    bundle: Bundle, to: str, *, dry_run: bool = False, report: Report = lambda done, total: None
) -> Published:
    """Publish to `hf://datasets/OWNER/NAME`. A repository that does not exist is made, private.

    Args:
        bundle: the release.
        to: the data set.
        dry_run: look, and change nothing.
        report: progress of what is sent.

    Raises:
        InputError: no token in the environment; a candidate; the version is taken by another release; the
            repository holds something else, or a newer version; the Hub refuses or cannot be reached; or
            what was sent reads back differently.
    """
    import huggingface_hub as hub

    repo = _repository(to)
    if "-" in bundle.version:
        raise InputError(
            "a candidate is not published to the Hub, where everybody loads the main branch", file=to
        )
    api = hub.HfApi(token=_token())
    for _ in range(_LOOKS):
        state = _look(api, repo, bundle.name)
        if state is None:
            if dry_run:
                return _published(bundle, repo, "planned", _all(bundle), None)
            with asking(to):
                api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
            continue
        tagged = state.tags.get(_tag(bundle.version))
        if tagged is not None:
            _require_same(bundle, _at(repo, tagged), state)
            return _published(bundle, repo, "already", [], tagged)
        commit = _found(state, bundle, to)
        sent = _all(bundle) if commit is None else []
        removed = _to_remove(bundle, repo, state) if commit is None else []
        if dry_run:
            return _published(bundle, repo, "planned", sent, commit)
        if commit is None:
            commit = _commit(api, repo, bundle, state.head, removed, report)
        if commit is None:
            continue  # somebody else's commit came first
        _require_same(bundle, _at(repo, commit), state)
        compare(_at(repo, commit), bundle.files)
        _put_tag(api, repo, bundle, commit)
        return _published(bundle, repo, "published", sent, commit)
    raise InputError(f"others commit to it all the time; looked {_LOOKS} times, run again", file=to)


def _repository(to: str) -> str:
    match = HUB.fullmatch(to.rstrip("/"))
    if match is None or match["revision"] is not None:
        raise InputError(f"cannot publish to '{to}'; expected hf://datasets/OWNER/NAME")
    return match["repo"]


def _token() -> str:
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise InputError("publishing to the Hub needs a token that may write, in the environment as HF_TOKEN")
    return token


def _tag(version: str) -> str:
    return f"v{version}"


def _at(repo: str, revision: str) -> Place:
    return open_place(f"hf://datasets/{repo}@{revision}")


def _all(bundle: Bundle) -> list[str]:
    return [*(file.path for file in bundle.files), MANIFEST]


def _published(bundle: Bundle, repo: str, state: Any, sent: Sequence[str], commit: str | None) -> Published:
    sizes = {file.path: file.bytes for file in bundle.files}
    return Published(
        f"hf://datasets/{repo}@{_tag(bundle.version)}", bundle.name, bundle.version, bundle.digest,
        state, list(sent), sum(sizes.get(path, 0) for path in sent), commit,
    )  # fmt: skip


# --- look -----------------------------------------------------------------------------------


def _look(api: Any, repo: str, name: str) -> _State | None:
    """What there is, or None when there is no such repository."""
    from huggingface_hub.errors import RepositoryNotFoundError

    with asking(f"hf://datasets/{repo}"):
        try:
            refs = api.list_repo_refs(repo, repo_type="dataset")
        except RepositoryNotFoundError:
            return None
        head = next(branch.target_commit for branch in refs.branches if branch.name == "main")
        log = api.list_repo_commits(repo, repo_type="dataset", revision=head)
    commits: dict[str, tuple[str, str]] = {}
    for commit in reversed(log):  # newest first; of two the first one counts, as its author was first
        match = _TITLE.fullmatch(commit.title)
        if match is not None and match["name"] == name:
            commits.setdefault(match["version"], (commit.commit_id, match["digest"]))
    return _State(head, {tag.name: tag.target_commit for tag in refs.tags}, commits)


def _found(state: _State, bundle: Bundle, to: str) -> str | None:
    """The commit of this release, if there is one.

    Raises:
        InputError: this version is another release's.
    """
    commit, digest = state.commits.get(bundle.version, (None, bundle.digest))
    if digest != bundle.digest:
        raise _taken(bundle, state, to, digest)
    return commit


def _taken(bundle: Bundle, state: _State | None, url: str, digest: str) -> InputError:
    free = free_version(bundle.version, lambda version: state is not None and state.taken(version))
    return InputError(
        f"this version exists with other content (digest {digest[:12]}), and a release never changes;"
        f" the next free version is {free}",
        file=url,
    )


def _require_same(bundle: Bundle, place: Place, state: _State | None) -> None:
    standing = read_remote_manifest(place)
    if standing is None:
        raise InputError("its tag stands, but no release is under it", file=place.url)
    if standing.digest != bundle.digest:
        raise _taken(bundle, state, place.url, standing.digest)


def _to_remove(bundle: Bundle, repo: str, state: _State) -> list[str]:
    """The files of the release before that this one has not.

    Raises:
        InputError: the repository holds something that is no earlier release of this name.
    """
    place = _at(repo, state.head)
    present = place.files().keys() - {"README.md"}  # the Hub makes one
    if not present:
        return []
    before = read_remote_manifest(place)
    where = f"hf://datasets/{repo}"
    if before is None or before.content.name != bundle.name:
        what = "something that is no release" if before is None else f"releases of '{before.content.name}'"
        raise InputError(f"holds {what}; '{bundle.name}' needs a repository of its own", file=where)
    if order(before.content.version) > order(bundle.version):
        raise InputError(
            f"its main branch holds the newer version {before.content.version}, which {bundle.version} would"
            " take the place of",
            file=where,
        )
    return sorted(present - {file.path for file in bundle.files} - {MANIFEST})


# --- change ---------------------------------------------------------------------------------


def _commit(
    api: Any, repo: str, bundle: Bundle, parent: str, removed: Sequence[str], report: Report
) -> str | None:
    """Send the files and make the one commit; None when the branch has moved from `parent`."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.errors import HfHubHTTPError

    added = [
        CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(bundle.folder / path))
        for path in _all(bundle)
    ]
    with asking(f"hf://datasets/{repo}"):
        done = 0
        for operation, file in zip(added, bundle.files, strict=False):
            # Sent one by one to be counted; the Hub keeps them, so they are not sent twice after a kill.
            api.preupload_lfs_files(repo, [operation], repo_type="dataset", free_memory=False)
            done += file.bytes
            report(done, bundle.bytes)
        try:
            made = api.create_commit(
                repo,
                [*added, *(CommitOperationDelete(path_in_repo=path, is_folder=False) for path in removed)],
                commit_message=f"Release {bundle.name} {bundle.version} (digest {bundle.digest})",
                repo_type="dataset",
                parent_commit=parent,
            )
        except HfHubHTTPError as error:
            if error.response.status_code in (409, 412):
                return None
            raise
    return str(made.oid)


def _put_tag(api: Any, repo: str, bundle: Bundle, commit: str) -> None:
    """Tag a commit; another publisher of the same release may have done it meanwhile."""
    with asking(f"hf://datasets/{repo}"):
        api.create_tag(
            repo,
            tag=_tag(bundle.version),
            tag_message=f"digest {bundle.digest}",
            revision=commit,
            repo_type="dataset",
            exist_ok=True,
        )
    # Read back: a tag that somebody else put elsewhere would be in the way of ours.
    _require_same(bundle, _at(repo, _tag(bundle.version)), None)
