"""A small Hub on 127.0.0.1: the endpoints that the real ``huggingface_hub`` client needs to push and fetch models.

It keeps repositories in memory, one list of commits a branch, and records each request. Only what the client relies on
is there; an address it does not know answers 404, so that a test that needs more says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.state import LFS_SUFFIXES, Commit, Refused, Repo, card_data, entry, git_oid, sha1

TOKEN = "hf_" + "T0ken" * 6
READ_TOKEN = "hf_" + "Reads" * 6


class Hub:
    """The server; use as a context manager. ``repos`` and ``requests`` are there for tests to look at."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail_next: list[str] = []  # substrings of requests to answer with 500, once each
        self.on_request: Callable[[str], None] = lambda request: None  # called before a request is answered
        self.connections = 0  # that are open
        self.lock = threading.Lock()
        handler = type("BoundHandler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Hub:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a repository as they stand."""
        commit = self.repos[repo_id].find(revision)
        assert commit is not None, f"{repo_id} has no {revision}"
        return commit.files

    def commits(self, repo_id: str, branch: str = "main") -> list[Commit]:
        """The commits that were pushed, oldest first."""
        return self.repos[repo_id].branches[branch][1:]


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        """All requests of a connection."""
        with self.hub.lock:
            self.hub.connections += 1
        try:
            super().handle()
        finally:
            with self.hub.lock:
                self.hub.connections -= 1

    def _dispatch(self) -> None:
        length = int(self.headers.get("Content-Length") or 0) if self.command != "HEAD" else 0
        body = self.rfile.read(length)
        if len(body) < length:  # whoever sent it is dead
            self.close_connection = True
            return
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        path = urlsplit(self.path).path
        self.hub.on_request(f"{self.command} {path}")
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            try:
                for wanted in self.hub.fail_next:
                    if wanted in f"{self.command} {path}":
                        self.hub.fail_next.remove(wanted)
                        raise Refused(500, message="planted failure")
                if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}", f"Bearer {READ_TOKEN}"):
                    raise Refused(401, message="Invalid credentials in Authorization header")
                for methods, pattern, action in _ROUTES:
                    if self.command in methods and (match := re.fullmatch(pattern, path)):
                        return action(self, *(part and unquote(part) for part in match.groups()), body=body)
                raise Refused(404, message=f"no such address: {path}")
            except Refused as refused:
                headers = {"X-Error-Message": refused.message}
                self._answer(refused.status, b"{}", headers | ({"X-Error-Code": refused.code} if refused.code else {}))

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _dispatch

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the requests are in ``hub.requests``."""

    def _known(self) -> bool:
        return self.headers.get("Authorization") is not None

    def _repo(self, repo_id: str) -> Repo:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not self._known()):
            raise Refused(404 if self._known() else 401, "RepoNotFound", "Repository not found")
        return repo

    def _open(self, repo_id: str) -> None:
        """A gated repository shows who it is to anybody, and its files to whoever may write."""
        if self._repo(repo_id).gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(403 if self._known() else 401, "GatedRepo", f"Access to model {repo_id} is restricted")

    def _commit(self, repo_id: str, revision: str) -> Commit:
        commit = self._repo(repo_id).find(revision)
        if commit is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _must_write(self) -> None:
        if not self._known():
            raise Refused(401, message="Invalid username or password.")
        if self.headers.get("Authorization") == f"Bearer {READ_TOKEN}":
            raise Refused(403, message="Forbidden: this token has no write access")

    def whoami(self, *, body: bytes) -> None:
        self._must_write()
        self._json({"name": "tester", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self, *, body: bytes) -> None:
        self._must_write()
        asked = json.loads(body)
        owner = asked.get("organization") or "tester"
        if owner == "forbidden":
            raise Refused(403, message="You don't have the rights to create a model under this namespace")
        repo_id = f"{owner}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self.hub.repos:
            return self._json(url, 409)
        self.hub.repos[repo_id] = Repo(private=asked.get("visibility") == "private")
        self._json(url)

    def validate(self, *, body: bytes) -> None:
        content = json.loads(body)["content"]
        ok = content.startswith("---\n") and "\n---\n" in content
        self._json({"errors": [] if ok else [{"message": "no metadata"}], "warnings": []})

    def branch(self, repo_id: str, name: str, *, body: bytes) -> None:
        self._must_write()
        branches = self._repo(repo_id).branches
        if name in branches:
            raise Refused(409, message="Reference already exists")
        branches[name] = list(branches["main"])
        self._json({})

    def preupload(self, repo_id: str, revision: str, *, body: bytes) -> None:
        self._must_write()
        held = self._commit(repo_id, revision).files
        files = []
        for item in json.loads(body)["files"]:
            lfs = item["path"].endswith(LFS_SUFFIXES)
            row = {"path": item["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            if (data := held.get(item["path"])) is not None:
                row["oid"] = hashlib.sha256(data).hexdigest() if lfs else git_oid(data)
            files.append(row)
        self._json({"files": files})

    def lfs_batch(self, repo_id: str, *, body: bytes) -> None:
        self._must_write()
        objects = []
        for item in json.loads(body)["objects"]:
            row = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.blobs:
                upload, verify = f"{self.hub.url}/lfs/{item['oid']}", f"{self.hub.url}/lfs-verify"
                row["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(row)
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str, *, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, message="content does not have the announced hash")
        self.hub.blobs[oid] = body
        self._json({})

    def lfs_verify(self, *, body: bytes) -> None:
        if json.loads(body)["oid"] not in self.hub.blobs:
            raise Refused(404, message="not uploaded")
        self._json({})

    def commit(self, repo_id: str, revision: str, *, body: bytes) -> None:
        self._must_write()
        history = self._repo(repo_id).branches.get(revision)
        if history is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = dict(history[-1].files)
        for line in body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        made = Commit(sha1(body + history[-1].oid.encode()), files)
        history.append(made)
        self._json({"success": True, "commitOid": made.oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{made.oid}"})

    def info(self, repo_id: str, revision: str = "main", *, body: bytes) -> None:
        commit = self._commit(repo_id, revision)
        siblings = [{"rfilename": path} for path in commit.files]
        about = {"id": repo_id, "sha": commit.oid, "private": self.hub.repos[repo_id].private, "tags": []}
        self._json(about | {"siblings": siblings, "cardData": card_data(commit.files)})

    def tree(self, repo_id: str, revision: str, folder: str | None = None, *, body: bytes) -> None:
        if folder is not None:
            raise Refused(404, "EntryNotFound", f"there is no {folder}")
        self._json([entry(path, data) for path, data in self._commit(repo_id, revision).files.items()])

    def paths_info(self, repo_id: str, revision: str, *, body: bytes) -> None:
        files = self._commit(repo_id, revision).files
        self._json([entry(path, files[path]) for path in parse_qs(body.decode())["paths"] if path in files])

    def resolve(self, repo_id: str, revision: str, path: str, *, body: bytes) -> None:
        commit = self._commit(repo_id, revision)
        self._open(repo_id)
        if path not in commit.files:
            raise Refused(404, "EntryNotFound", "Entry not found")
        data = commit.files[path]
        etag = hashlib.sha256(data).hexdigest() if path.endswith(LFS_SUFFIXES) else git_oid(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit.oid, "X-Linked-Size": str(len(data))}
        headers |= {"X-Linked-Etag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), int(asked[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return self._answer(206, data[first : last + 1], headers)
        self._answer(200, data, headers)


_ID = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("GET",), "/api/whoami-v2", _Handler.whoami),
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.validate),
    (("POST",), f"/api/models/{_ID}/branch/([^/]+)", _Handler.branch),
    (("POST",), f"/api/models/{_ID}/preupload/([^/]+)", _Handler.preupload),
    (("POST",), f"/{_ID}.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("PUT",), r"/lfs/(\w+)", _Handler.lfs_put),
    (("POST",), "/lfs-verify", _Handler.lfs_verify),
    (("POST",), f"/api/models/{_ID}/commit/([^/]+)", _Handler.commit),
    (("POST",), f"/api/models/{_ID}/paths-info/([^/]+)", _Handler.paths_info),
    (("GET",), f"/api/models/{_ID}", _Handler.info),
    (("GET",), f"/api/models/{_ID}/revision/([^/]+)", _Handler.info),
    (("GET",), f"/api/models/{_ID}/tree/([^/]+)(?:/(.+))?", _Handler.tree),
    (("GET", "HEAD"), f"/{_ID}/resolve/([^/]+)/(.+)", _Handler.resolve),
]
