"""What `huggingface_hub` asks the Hub for, in this process, of one data set repository.

Strict where it matters: a commit must name the head as its parent, a tag is not moved, LFS objects must have
been sent before a commit names them, and whatever else is asked for is a 404 that is recorded.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_for_tests_only"


@dataclass
class Commit:
    title: str
    files: dict[str, bytes]
    parent: str | None

    @property
    def id(self) -> str:
        told = json.dumps(
            [self.title, self.parent, {p: sha256(d).hexdigest() for p, d in self.files.items()}]
        )
        return sha1(told.encode()).hexdigest()


@dataclass
class Repository:
    """The state of the data set, and what was asked of it.

    Attributes:
        before_commit: called once with a commit's body before it is looked at, for rivals.
        fail_tag: answer the next tag with 500: the publisher dies between commit and tag.
    """

    name: str
    exists: bool = True
    private: bool = False
    log: list[str] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    before_commit: Callable[[], None] | None = None
    fail_tag: bool = False

    def __post_init__(self) -> None:
        self.commits.append(Commit("initial commit", {".gitattributes": b"*.parquet lfs\n"}, None))

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        if revision == "main":
            return self.head
        wanted = self.tags.get(revision, revision)
        return next((commit for commit in self.commits if commit.id == wanted), None)

    def put(self, title: str, **files: bytes) -> Commit:
        """A commit of somebody else."""
        made = Commit(title, {**self.head.files, **files}, self.head.id)
        self.commits.append(made)
        return made


@contextmanager
def serving(repository: Repository) -> Iterator[str]:
    """Serve it on a free port; the endpoint."""
    handler = type("Handler", (_Handler,), {"repository": repository})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


_LOCK = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    repository: Repository
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *told: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path = unquote(url.path)
        repository = self.repository
        repository.asked.append(f"{self.command} {path}")
        writes = self.command in ("POST", "PUT") and not path.startswith("/lfs/")
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json(401, {"error": "who are you?"})
        if path == "/api/repos/create":
            repository.exists = True
            repository.private = json.loads(body).get("visibility") == "private"
            return self._json(200, {"url": f"{self._here}/datasets/{repository.name}"})
        if path == "/api/validate-yaml":
            return self._json(200, {"errors": [], "warnings": []})
        if path == "/api/agent-harnesses":  # what the client asks about itself; it goes without, too
            return self._json(404, {"error": "none"})
        if path.startswith("/lfs/"):
            oid = path.removeprefix("/lfs/")
            assert sha256(body).hexdigest() == oid
            repository.objects[oid] = body
            return self._send(200, b"", {})
        if not repository.exists:
            return self._error(404, "RepoNotFound", "Repository not found")
        if path == f"/datasets/{repository.name}.git/info/lfs/objects/batch":
            return self._batch(json.loads(body))
        resolve = re.fullmatch(rf"/datasets/{repository.name}/resolve/([^/]+)/(.+)", path)
        if resolve:
            return self._file(*resolve.groups())
        api = re.fullmatch(rf"/api/datasets/{repository.name}(?:/([\w-]+))?(?:/([^/]+))?(?:/(.*))?", path)
        if api:
            act = getattr(self, f"_api_{(api[1] or 'revision').replace('-', '_')}", None)
            if act is not None:
                with _LOCK:
                    return act(api[2] or "main", api[3] or "", body, parse_qs(url.query))  # type: ignore[no-any-return]
        repository.unknown.append(f"{self.command} {self.path}")
        return self._json(404, {"error": "not spoken here"})

    # --- reading --------------------------------------------------------------------------

    def _api_revision(self, revision: str, _: str, body: bytes, query: Any) -> None:
        commit = self.repository.at(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self._json(200, {
            "id": self.repository.name, "sha": commit.id, "private": self.repository.private, "tags": [],
            "siblings": [{"rfilename": path} for path in commit.files],
        })  # fmt: skip

    def _api_refs(self, *_: Any) -> None:
        self._json(200, {
            "branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": self.repository.head.id}],
            "converts": [],
            "tags": [
                {"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": commit}
                for tag, commit in self.repository.tags.items()
            ],
        })  # fmt: skip

    def _api_commits(self, revision: str, *_: Any) -> None:
        upto = self.repository.at(revision)
        assert upto is not None
        known = self.repository.commits[: self.repository.commits.index(upto) + 1]
        self._json(200, [
            {"id": commit.id, "authors": [{"user": "somebody"}], "date": "2026-12-01T00:00:00.000Z",
             "title": commit.title, "message": ""}
            for commit in reversed(known)
        ])  # fmt: skip

    def _api_tree(self, revision: str, folder: str, body: bytes, query: dict[str, list[str]]) -> None:
        commit = self.repository.at(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound", revision)
        recursive = query.get("recursive", ["false"])[0].lower() == "true"
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, Any] = {}
        for path, data in commit.files.items():
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            for i in range(1, len(parts) if recursive else min(len(parts), 2)):
                name = prefix + "/".join(parts[:i])
                entries[name] = {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
            if recursive or len(parts) == 1:
                entries[path] = _entry(path, data)
        if prefix and not entries:
            return self._error(404, "EntryNotFound", folder)
        return self._json(200, list(entries.values()))

    def _api_paths_info(self, revision: str, _: str, body: bytes, query: Any) -> None:
        commit = self.repository.at(revision)
        assert commit is not None
        wanted = json.loads(body)["paths"]
        self._json(200, [_entry(path, commit.files[path]) for path in wanted if path in commit.files])

    def _file(self, revision: str, path: str) -> None:
        commit = self.repository.at(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound", revision)
        if path not in commit.files:
            return self._error(404, "EntryNotFound", path)
        data = commit.files[path]
        headers = {"ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": commit.id}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._send(200, data, headers)
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._send(206, data[first : last + 1], headers)

    # --- writing --------------------------------------------------------------------------

    def _api_preupload(self, revision: str, _: str, body: bytes, query: Any) -> None:
        files = json.loads(body)["files"]
        self._json(200, {"files": [
            {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".parquet") else "regular",
             "shouldIgnore": False}
            for file in files
        ]})  # fmt: skip

    def _batch(self, told: dict[str, Any]) -> None:
        objects = []
        for one in told["objects"]:
            if one["oid"] not in self.repository.objects:
                one = {**one, "actions": {"upload": {"href": f"{self._here}/lfs/{one['oid']}"}}}
            objects.append(one)
        self._json(200, {"transfer": "basic", "objects": objects}, "application/vnd.git-lfs+json")

    def _api_commit(self, revision: str, _: str, body: bytes, query: Any) -> None:
        if self.repository.before_commit is not None:
            act, self.repository.before_commit = self.repository.before_commit, None
            act()
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        assert revision == "main"
        if header.get("parentCommit") != self.repository.head.id:
            return self._error(412, "PreconditionFailed", "A commit has happened since.")
        files = dict(self.repository.head.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.repository.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                assert line["key"] == "header", line
        commit = Commit(header["summary"], files, self.repository.head.id)
        self.repository.commits.append(commit)
        return self._json(200, {
            "commitUrl": f"{self._here}/datasets/{self.repository.name}/commit/{commit.id}",
            "commitOid": commit.id, "success": True,
        })  # fmt: skip

    def _api_tag(self, revision: str, _: str, body: bytes, query: Any) -> None:
        if self.repository.fail_tag:
            self.repository.fail_tag = False
            return self._error(500, "InternalError", "the lights went out")
        tag = json.loads(body)["tag"]
        if tag in self.repository.tags:
            return self._error(409, "Conflict", "Tag reference exists already")
        commit = self.repository.at(revision)
        assert commit is not None
        self.repository.tags[tag] = commit.id
        return self._json(200, {})

    # --- answers --------------------------------------------------------------------------

    @property
    def _here(self) -> str:
        return f"http://{self.headers['Host']}"

    def _json(self, status: int, value: Any, kind: str = "application/json") -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": kind})

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(path: str, data: bytes) -> dict[str, Any]:
    blob = sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob}
    if path.endswith(".parquet"):
        entry["lfs"] = {"oid": sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
