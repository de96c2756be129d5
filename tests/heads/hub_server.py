"""A stand-in for the Hub on this machine: the endpoints that huggingface_hub calls, repositories in memory, faults on demand.

It speaks what huggingface_hub 2.4 sends with Xet switched off: create, branch, info, tree, validate-yaml, preupload, LFS batch, upload
(whole or in parts) and verification, commit, and downloads with etags.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from tests.heads.hub_repo import Repo, git_oid, problems

LFS_FROM = 1024  # bytes; the Hub decides by size and kind
LFS_KINDS = (".safetensors", ".bin")
TOKEN = "hf_" + "secretTokenOfATest" * 2


class HubServer:
    """The server. `requests`: (method, path) of all; `uploaded`: bytes received of each object, per sending.

    `plant(pattern, fault)`: every request whose "METHOD path" matches is answered by the fault: a status, or "cut", which reads half
    of the body and drops the connection; `times` limits how often.
    """

    def __init__(self, part_size: int | None = None) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.part_size = part_size
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.uploaded: dict[str, list[int]] = defaultdict(list)
        self.faults: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.http = _Http(("127.0.0.1", 0), _Handler)
        self.http.hub = self
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def plant(self, pattern: str, fault: int | str, times: int = 1_000_000, **more: Any) -> None:
        self.faults.append({"pattern": re.compile(pattern), "fault": fault, "times": times} | more)

    def fault(self, request: str) -> dict[str, Any] | None:
        with self.lock:
            for each in self.faults:
                if each["times"] and each["pattern"].search(request):
                    each["times"] -= 1
                    return each
        return None

    def close(self) -> None:
        """Stop at once; connections that clients keep are lost."""
        self.http.shutdown()
        self.http.server_close()
        for connection in self.http.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.thread.join()


class _Http(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False
    hub: HubServer

    def __init__(self, *args: Any) -> None:
        self.connections: list[socket.socket] = []
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *_: Any) -> None:
        """A connection that was cut on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    ROUTES: tuple[tuple[str, str], ...] = (
        (r"POST /api/repos/create", "create"),
        (r"POST /api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>.+)", "branch"),
        (r"(GET) /api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>.+))?", "info"),
        (r"GET /api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)/?", "tree"),
        (r"POST /api/validate-yaml", "validate"),
        (r"POST /api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>.+)", "preupload"),
        (r"POST /(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        (r"PUT /lfs/(?P<oid>[0-9a-f]{64})", "put"),
        (r"PUT /lfs/(?P<oid>[0-9a-f]{64})/(?P<part>\d+)", "put_part"),
        (r"POST /lfs/(?P<oid>[0-9a-f]{64})/complete", "complete"),
        (r"POST /lfs/verify", "verify"),
        (r"POST /api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>.+)", "commit"),
        (r"(HEAD|GET) /(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def handle_request(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        with hub.lock:
            hub.requests.append((self.command, path))
            hub.tokens.add(self.headers.get("Authorization"))
        length = int(self.headers.get("Content-Length") or 0)
        planted = hub.fault(request)
        if planted is not None and planted["fault"] == "cut":
            self.read_body(length // 2, request)
            self.drop()
            return
        body = self.read_body(length, request)
        if planted is not None:
            echo = {"error": planted.get("says", "planted") + " for " + str(self.headers.get("Authorization"))}
            self.send(planted["fault"], echo, planted.get("headers", {}))
            return
        for pattern, name in self.ROUTES:
            if found := re.fullmatch(pattern, request):
                with hub.lock:
                    answer: Callable[..., None] = getattr(self, f"on_{name}")
                    answer(body, **found.groupdict())
                return
        self.send(404, {"error": f"no endpoint {request}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self, length: int, request: str) -> bytes:
        body = self.rfile.read(length)
        if request.startswith("PUT /lfs/"):
            self.server.hub.uploaded[request.split("/")[2]].append(len(body))
        return body

    def drop(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def send(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        with suppress(OSError):
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            if not isinstance(content, bytes):
                self.send_header("Content-Type", "application/json")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    def repo(self, name: str) -> Repo | None:
        found = self.server.hub.repos.get(name)
        if found is None:
            self.send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return found

    def at(self, repo: Repo, revision: str | None) -> str | None:
        oid = repo.branches.get(revision or "main", revision)
        if oid not in repo.commits:
            self.send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return oid

    def on_create(self, body: bytes) -> None:
        hub, asked = self.server.hub, json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in hub.repos:
            self.send(409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"})
            return
        hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        hub.repos[name].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.send(200, {"url": f"{hub.url}/{name}", "name": name})

    def on_branch(self, body: bytes, repo: str, revision: str) -> None:
        if found := self.repo(repo):
            if revision in found.branches:
                self.send(409, {"error": "Reference already exists"})
                return
            found.branches[revision] = found.branches["main"]
            self.send(200, {})

    def on_info(self, body: bytes, repo: str, revision: str | None) -> None:
        if (found := self.repo(repo)) and (oid := self.at(found, revision)):
            names = [{"rfilename": name} for name in found.commits[oid]]
            self.send(200, {"id": repo, "sha": oid, "private": found.private, "siblings": names, "tags": []})

    def on_tree(self, body: bytes, repo: str, revision: str) -> None:
        if (found := self.repo(repo)) and (oid := self.at(found, revision)):
            rows: list[dict[str, Any]] = []
            for path, content in found.commits[oid].items():
                row: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
                if path in found.lfs:
                    row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
                rows.append(row)
            self.send(200, rows)

    def on_validate(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        found = re.match(r"\s*---\r?\n([\s\S]*?)\r?\n---[ \t]*(\r?\n|$)", content)
        errors = problems(yaml.safe_load(found[1]) if found else None)
        answer = {"errors": [{"message": error} for error in errors], "warnings": []}
        self.send(400 if errors else 200, answer)

    def on_preupload(self, body: bytes, repo: str, revision: str) -> None:
        if (found := self.repo(repo)) and (oid := self.at(found, revision)):
            files = []
            for asked in json.loads(body)["files"]:
                path, there = asked["path"], found.commits[oid].get(asked["path"])
                mode = "lfs" if path.endswith(LFS_KINDS) or asked["size"] > 10_000_000 else "regular"
                known = None
                if there is not None:
                    known = hashlib.sha256(there).hexdigest() if path in found.lfs else git_oid(there)
                files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": known})
            self.send(200, {"files": files})

    def on_batch(self, body: bytes, repo: str) -> None:
        hub = self.server.hub
        if self.repo(repo) is None:
            return
        objects = []
        for asked in json.loads(body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in hub.objects:
                answer["actions"] = self.actions(asked["oid"], asked["size"])
            objects.append(answer)
        self.send(200, {"transfer": "basic" if hub.part_size is None else "multipart", "objects": objects})

    def actions(self, oid: str, size: int) -> dict[str, Any]:
        hub = self.server.hub
        verify = {"href": f"{hub.url}/lfs/verify"}
        if hub.part_size is None:
            return {"upload": {"href": f"{hub.url}/lfs/{oid}"}, "verify": verify}
        count = -(-size // hub.part_size)
        header = {str(part): f"{hub.url}/lfs/{oid}/{part}" for part in range(1, count + 1)}
        header["chunk_size"] = str(hub.part_size)
        return {"upload": {"href": f"{hub.url}/lfs/{oid}/complete", "header": header}, "verify": verify}

    def on_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self.send(400, {"error": "another content than announced"})
            return
        self.server.hub.objects[oid] = body
        self.send(200, {})

    def on_put_part(self, body: bytes, oid: str, part: str) -> None:
        self.server.hub.parts[oid, int(part)] = body
        self.send(200, {}, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def on_complete(self, body: bytes, oid: str) -> None:
        hub = self.server.hub
        numbers = [part["partNumber"] for part in json.loads(body)["parts"]]
        whole = b"".join(hub.parts[oid, number] for number in numbers)
        if hashlib.sha256(whole).hexdigest() != oid:
            self.send(400, {"error": "the parts make another content"})
            return
        hub.objects[oid] = whole
        self.send(200, {})

    def on_verify(self, body: bytes) -> None:
        asked = json.loads(body)
        there = self.server.hub.objects.get(asked["oid"])
        self.send(200 if there is not None and len(there) == asked["size"] else 404, {})

    def on_commit(self, body: bytes, repo: str, revision: str) -> None:
        hub = self.server.hub
        if not ((found := self.repo(repo)) and (oid := self.at(found, revision))):
            return
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit", oid) != oid:
            self.send(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(found.commits[oid])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
                found.lfs.add(value["path"])
            else:
                assert line["key"] == "deletedFile", line
                del files[value["path"]]
        new = found.commit(revision, files, header["summary"])
        self.send(200, {"commitUrl": f"{hub.url}/{repo}/commit/{new}", "commitOid": new, "pullRequestUrl": None})

    def on_resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        if (found := self.repo(repo)) and (oid := self.at(found, revision)):
            content = found.commits[oid].get(path)
            if content is None:
                self.send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
                return
            etag = hashlib.sha256(content).hexdigest() if path in found.lfs else git_oid(content)
            self.send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": oid})
