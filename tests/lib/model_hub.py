"""A Hugging Face Hub on the loopback interface: uploads (repositories, LFS objects, commits), and downloads of files.

Everything is in a folder: ``lfs/SHA256`` has the objects, ``repositories/ORG/NAME/REVISION`` the files of each branch
after its last commit. A request to write needs ``TOKEN``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "Secret0" * 5
#: Files of at most this many bytes are no LFS objects, unless they are of GGUF.
_MAX_REGULAR = 10 << 20


class ModelHub:
    """The stand-in; ``puts`` are the objects that were sent, ``fault`` gets each request and may return a status."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.puts: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.commits: list[list[str]] = []
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        #: Changes the bytes of an object that arrive.
        self.damage: Callable[[bytes], bytes] = lambda data: data
        hub = self

        class Handler(_Handler):
            owner = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which huggingface_hub uses the stand-in: no Xet, for its servers are the Hub's own."""
        home = str(self.folder / "home")
        variables = {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1"}
        return {**os.environ, **variables, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def repository(self, name: str, revision: str = "main") -> Path:
        """Return the folder with a branch of a repository."""
        return self.folder / "repositories" / name / revision

    def lfs(self, oid: str) -> Path:
        return self.folder / "lfs" / oid

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: ModelHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        """Do not log requests."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.owner.requests.append((self.command, path))
        if (status := self.owner.fault(self.command, path)) is not None:
            # The Hub's explanations may quote what was sent.
            message = f"storage quota exceeded for {self.headers.get('Authorization')} at {self.owner.url}/x?sig=1"
            return self._send(status, {"error": message}, {"X-Error-Message": message})
        for method, pattern, function in _ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                return function(self, body, *match.groups())
        return self._send(404, {"error": path})

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _send(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response_only(status)
        for name, value in {**(headers or {}), "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _may_write(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._send(401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials in header"})
        return False

    def _branch(self, name: str, revision: str) -> Path | None:
        """Return the folder of a branch or commit; answer and return None if there is none."""
        if not self.owner.repository(name).is_dir():
            self._send(404, {}, {"X-Error-Code": "RepoNotFound"})
            return None
        branch = self.owner.repository(name, revision)
        if not branch.is_dir():
            self._send(404, {}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return branch

    def create(self, body: bytes) -> None:
        if not self._may_write():
            return None
        wish = json.loads(body)
        name = f"{wish['organization']}/{wish['name']}"
        folder = self.owner.repository(name)
        if folder.is_dir():
            return self._send(409, {"error": "exists"})
        folder.mkdir(parents=True)
        is_private = wish.get("visibility") == "private" or bool(wish.get("private"))
        (folder.parent / "private.json").write_text(json.dumps(is_private))
        return self._send(200, {"url": f"{self.owner.url}/{name}", "name": name, "id": name})

    def info(self, body: bytes, name: str) -> None:
        if self._branch(name, "main") is None:
            return None
        private = json.loads((self.owner.repository(name).parent / "private.json").read_text())
        return self._send(
            200, {"id": name, "sha": "0" * 40, "private": private, "siblings": [], "tags": [], "disabled": False}
        )

    def paths_info(self, body: bytes, name: str, revision: str) -> None:
        branch = self._branch(name, revision)
        if branch is None:
            return None
        paths = parse_qs(body.decode())["paths"]
        return self._send(200, [_facts(branch, path) for path in paths if (branch / path).is_file()])

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        branch = self._branch(name, revision)
        if branch is None:
            return None
        if not (branch / path).is_file():
            return self._send(404, {}, {"X-Error-Code": "EntryNotFound"})
        data, facts = (branch / path).read_bytes(), _facts(branch, path)
        self.send_response_only(200)
        for header, value in {
            **{"Content-Length": len(data), "ETag": f'"{facts.get("lfs", facts)["oid"]}"', "X-Repo-Commit": "0" * 40},
            "Content-Type": "application/octet-stream",
        }.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
        return None

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        branch = self._branch(name, revision)
        if branch is None or not self._may_write():
            return None
        answers = []
        for file in json.loads(body)["files"]:
            facts = _facts(branch, file["path"]) if (branch / file["path"]).is_file() else {}
            is_lfs = file["path"].endswith(".gguf") or file["size"] > _MAX_REGULAR
            oid = facts.get("lfs", facts).get("oid")
            mode = "lfs" if is_lfs else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return self._send(200, {"files": answers})

    def batch(self, body: bytes, name: str) -> None:
        if self._branch(name, "main") is None or not self._may_write():
            return None
        objects = []
        for item in json.loads(body)["objects"]:
            action = {"upload": {"href": f"{self.owner.url}/lfs/{item['oid']}"}}
            objects.append(item if self.owner.lfs(item["oid"]).is_file() else {**item, "actions": action})
        return self._send(200, {"transfer": "basic", "objects": objects})

    def store_object(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._send(400, {"error": "another SHA-256"})
        self.owner.puts.append(oid)
        path = self.owner.lfs(oid)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.owner.damage(body))
        return self._send(200, {})

    def validate(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        errors = [{"message": '"license" must be one of a list'}] if "license: none-such" in content else []
        self._send(400 if errors else 200, {"errors": errors, "warnings": []})

    def branch(self, body: bytes, name: str, revision: str) -> None:
        if not self._may_write():
            return None
        folder = self.owner.repository(name, revision)
        if folder.is_dir():
            return self._send(409, {"error": "exists"})
        shutil.copytree(self.owner.repository(name), folder)
        return self._send(200, {})

    def commit(self, body: bytes, name: str, revision: str) -> None:
        branch = self._branch(name, revision)
        if branch is None or not self._may_write():
            return None
        names = []
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                continue
            names.append(value["path"])
            target = branch / value["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            if item["key"] == "lfsFile":
                shutil.copy(self.owner.lfs(value["oid"]), target)
            else:
                target.write_bytes(base64.b64decode(value["content"]))
        self.owner.commits.append(names)
        oid = f"{len(self.owner.commits):040x}"
        shutil.copytree(branch, self.owner.repository(name, oid))
        return self._send(
            200, {"commitUrl": f"{self.owner.url}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}
        )


_API = r"/api/models/([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("GET", _API, _Handler.info),
    ("POST", f"{_API}/paths-info/(.+)", _Handler.paths_info),
    *((method, r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", _Handler.resolve) for method in ("GET", "HEAD")),
    ("POST", f"{_API}/preupload/(.+)", _Handler.preupload),
    ("POST", f"{_API}/branch/(.+)", _Handler.branch),
    ("POST", f"{_API}/commit/(.+)", _Handler.commit),
    ("POST", r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", _Handler.store_object),
]


def _facts(branch: Path, path: str) -> dict[str, Any]:
    data = (branch / path).read_bytes()
    facts: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
    facts["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if path.endswith(".gguf") or len(data) > _MAX_REGULAR:
        facts["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        facts["oid"] = "f" * 40
    return facts


@contextmanager
def model_hub(folder: Path) -> Iterator[ModelHub]:
    """Run a Hub with its state in a folder."""
    hub = ModelHub(folder)
    try:
        yield hub
    finally:
        hub.close()


if __name__ == "__main__":  # python tests/lib/model_hub.py FOLDER: a Hub until the process is stopped
    with model_hub(Path(sys.argv[1])) as server:
        print(server.url, flush=True)
        while True:
            time.sleep(60)
