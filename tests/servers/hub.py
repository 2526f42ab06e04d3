"""A stand-in for the Hugging Face Hub: what readers need of it, with files served by a CDN on another host."""

import base64
import hashlib
import http.server
import itertools
import json
import re
import shutil
import threading
import urllib.parse
from pathlib import Path

TOKEN = "hf_testtoken123456"
COMMITS = ("1" * 40, "2" * 40)


class Hub:
    """Repositories are folders below `root`/datasets/OWNER/NAME/COMMIT; `main` is the last commit that is there.

    `private` are the names that want `TOKEN`; `log` has (method, path, range, authorization) of each request,
    `cdn_host` is where files are redirected to: the same server by another name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private: set[str] = set()
        self.log: list[tuple[str, str, str, str]] = []
        self._numbers = itertools.count()
        self._committing = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.cdn_host = f"localhost:{port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def folder(self, name: str, commit: str) -> Path:
        return self.root / "datasets" / name / commit

    def commit_of(self, name: str, revision: str) -> str | None:
        there = sorted(folder.name for folder in (self.root / "datasets" / name).glob("?" * 40))
        if revision == "main" and there:
            return there[-1]
        return revision if revision in there else None

    def commit(self, name: str, changes: dict[str, bytes | None]) -> str:
        """Make a commit of what `main` has and these files; None removes one."""
        with self._committing:
            last, new = self.commit_of(name, "main"), f"3{next(self._numbers):039}"
            work = self.folder(name, "being made")
            if last is None:
                work.mkdir(parents=True)
            else:
                shutil.copytree(self.folder(name, last), work)
            for path, data in changes.items():
                file = work / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.unlink(missing_ok=True) if data is None else file.write_bytes(data)
            work.rename(self.folder(name, new))
            return new

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # more connections at once would be made seconds later

    def handle_error(self, request, client_address):
        """Say nothing of clients that hang up."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    @property
    def hub(self):
        return self.server.hub

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        authorization = self.headers.get("Authorization", "")
        self.hub.log.append((self.command, path, self.headers.get("Range", ""), authorization))
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/revision/(.+)", path):
            self._revision(*match.groups(), authorization)
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            self._tree(match[1], match[2], match[3] or "", authorization)
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)", path):
            self._revision(match[1], "main", authorization)
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups(), authorization)
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            self._file(self.hub.folder(match[1], match[2]) / match[3])
        else:
            self._answer(404, b"")

    do_HEAD = do_GET  # noqa: N815 - so http.server calls it

    def do_POST(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        authorization = self.headers.get("Authorization", "")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.log.append((self.command, path, "", authorization))
        match = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/(paths-info|preupload|commit)/([^/]+)", path)
        if match is None:
            self._answer(404, b"{}")
        elif not self._refused(match[1], authorization):
            getattr(self, f"_{match[2].replace('-', '_')}")(match[1], match[3], body)

    def _paths_info(self, name, revision, body):
        form = urllib.parse.parse_qs(body.decode())
        wanted = form["paths"] if "paths" in form else json.loads(body)["paths"]
        commit = self.hub.commit_of(name, revision)
        folder = self.hub.folder(name, commit)
        found = [_entry(folder, folder / path) for path in wanted if (folder / path).exists()]
        self._answer(200, json.dumps(found).encode(), ("Content-Type", "application/json"))

    def _preupload(self, name, revision, body):
        """Say that every file is small enough to come with the commit."""
        files = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
            for file in json.loads(body)["files"]
        ]
        self._answer(200, json.dumps({"files": files}).encode())

    def _commit(self, name, revision, body):
        changes = {}
        for line in map(json.loads, body.splitlines()):
            if line["key"] in ("file", "deletedFile"):
                value = line["value"]
                changes[value["path"]] = base64.b64decode(value["content"]) if "content" in value else None
        commit = self.hub.commit(name, changes)
        answer = {"commitUrl": f"{self.hub.endpoint}/datasets/{name}/commit/{commit}", "commitOid": commit}
        self._answer(200, json.dumps(answer).encode())

    def _tree(self, name, revision, below, authorization):
        if self._refused(name, authorization):
            return
        commit = self.hub.commit_of(name, revision)
        if commit is None:
            self._answer(404, b"{}", ("X-Error-Code", "RevisionNotFound"))
            return
        folder = self.hub.folder(name, commit)
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        if not (folder / below).is_dir():
            self._answer(404, b"{}", ("X-Error-Code", "EntryNotFound"))
            return
        found = sorted((folder / below).rglob("*") if deep else (folder / below).iterdir())
        self._answer(200, json.dumps([_entry(folder, path) for path in found]).encode())

    def _refused(self, name, authorization):
        known = (self.hub.root / "datasets" / name).is_dir()
        if known and (name not in self.hub.private or authorization == f"Bearer {TOKEN}"):
            return False
        self._answer(401, b"{}", ("X-Error-Code", "RepoNotFound"))
        return True

    def _revision(self, name, revision, authorization):
        if self._refused(name, authorization):
            return
        commit = self.hub.commit_of(name, revision)
        if commit is None:
            self._answer(404, b"{}", ("X-Error-Code", "RevisionNotFound"))
        else:
            self._answer(200, json.dumps({"id": name, "sha": commit}).encode())

    def _resolve(self, name, revision, rest, authorization):
        if self._refused(name, authorization):
            return
        commit = self.hub.commit_of(name, revision) or revision
        if not (self.hub.folder(name, commit) / rest).is_file():
            self._answer(404, b"", ("X-Error-Code", "EntryNotFound"))
        elif (self.hub.folder(name, commit) / rest).stat().st_size < 4000:
            self._file(self.hub.folder(name, commit) / rest)
        else:
            where = f"http://{self.hub.cdn_host}/cdn/{name}/{commit}/{urllib.parse.quote(rest)}?Signature=sigsigsig"
            self._answer(302, b"", ("Location", where))

    def _file(self, file):
        data = file.read_bytes()
        etag = ("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not match:
            self._answer(200, data, etag)
        elif int(match[1]) >= len(data):
            self._answer(416, b"", ("Content-Range", f"bytes */{len(data)}"))
        else:
            body = data[int(match[1]) : int(match[2]) + 1]
            last = int(match[1]) + len(body) - 1
            self._answer(206, body, etag, ("Content-Range", f"bytes {match[1]}-{last}/{len(data)}"))

    def _answer(self, status, body, *headers):
        self.send_response(status)
        for name, value in (("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(folder, path):
    kind = "directory" if path.is_dir() else "file"
    size = 0 if path.is_dir() else path.stat().st_size
    oid = hashlib.sha1(str(path).encode()).hexdigest()
    return {"type": kind, "oid": oid, "size": size, "path": path.relative_to(folder).as_posix()}
