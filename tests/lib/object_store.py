"""An S3 server on the loopback interface, behind a proxy that counts requests and injects faults.

The server is moto, in a process of its own: ``python -m moto.server -p 0``. The proxy is a thread of this process;
clients reach the server through it (AWS_ENDPOINT_URL).
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: Names of faults: what happens to a request.
FAULTS = ("reset", "lost", "cut", "short", "503", "429", "stall", "flip")
#: Seconds of a stalled request: longer than the clients' timeout in these tests.
STALL = 1.6


@dataclass
class Request:
    """A client's request, and the number of bytes of the response."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    nbytes: int
    fault: str | None = None
    served: int = 0
    status: int = 0

    @property
    def is_part(self) -> bool:
        """Return whether it uploads a part."""
        return self.method == "PUT" and "partNumber" in self.query


class Proxy:
    """A proxy that records requests in ``seen``; ``fault`` selects the fault of a request."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.requests: list[Request] = []
        self.fault: Callable[[Request], str | None] = lambda request: None
        self.before: Callable[[Request], None] = lambda request: None
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *args: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def clear(self) -> None:
        """Clear the recorded requests and the fault."""
        self.requests.clear()
        self.fault, self.before = lambda request: None, lambda request: None

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def served(self) -> int:
        """Return the number of bytes of objects sent to clients."""
        return sum(r.served for r in self.requests if r.method == "GET")


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"
    # Otherwise a body waits 40 ms for the client's acknowledgement of the headers.
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        """Do not log requests."""

    def _answer(self) -> None:
        nbytes = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(nbytes)
        split = urlsplit(self.path)
        query = parse_qs(split.query, keep_blank_values=True)
        request = Request(self.command, split.path, query, dict(self.headers), nbytes)
        owner = self.owner
        owner.before(request)
        fault = request.fault = owner.fault(request)
        owner.requests.append(request)
        if fault == "stall":
            time.sleep(STALL)
        if fault in ("reset", "stall"):
            return self._break()
        if fault in ("503", "429", "403", "404", "401"):
            return self._refuse(int(fault), request)
        if fault == "flip" and body:
            body = body[: nbytes // 2] + bytes([body[nbytes // 2] ^ 1]) + body[nbytes // 2 + 1 :]
        upstream = http.client.HTTPConnection("127.0.0.1", owner.upstream, timeout=30)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "connection")}
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if fault == "lost":
            return self._break()
        if fault == "flip" and not body and data:
            data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        if fault == "short":
            data = data[: len(data) // 2]
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        request.status = answer.status
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
            request.served = len(data)
        if fault == "cut":
            return self._break()
        return None

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def _refuse(self, status: int, request: Request) -> None:
        code = {503: "SlowDown", 429: "TooManyRequests", 403: "AccessDenied", 401: "Unauthorized"}.get(
            status, "NoSuchKey"
        )
        body = f"<Error><Code>{code}</Code><Message>secret-of-the-server</Message></Error>".encode()
        request.status = status
        self.send_response_only(status)
        self.send_header("Retry-After", "0.05")
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _break(self) -> None:
        """Reset the connection."""
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


@contextmanager
def moto_server() -> Iterator[int]:
    """Run moto in its own process; yield its port."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    # Small parts, for small models.
    environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "65536"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    try:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if match := re.search(r"Running on http://[^:]+:(\d+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        drain = threading.Thread(target=lambda: [None for _ in server.stderr or ()])
        drain.start()
        yield int(match[1])
    finally:
        server.kill()
        server.wait()
        drain.join()
        server.stderr.close()


class _HubHandler(BaseHTTPRequestHandler):
    """The Hub's API for HfFileSystem, for one repository, org/NAME, with its files in ``root``."""

    root: Path
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Do not log requests."""

    def _answer(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        path, commit = urlsplit(self.path).path, {"X-Repo-Commit": "c" * 40}
        if path.startswith(f"/api/models/org/{self.root.name}"):
            facts: Any = {"id": f"org/{self.root.name}", "sha": "c" * 40, "siblings": [], "private": False, "tags": []}
            if "/tree/" in path:
                files = sorted(self.root.iterdir())
                facts = [{"type": "file", "oid": "0" * 40, "size": f.stat().st_size, "path": f.name} for f in files]
            return self._answer(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})
        file = self.root / path.rpartition("/")[2]
        if "/resolve/" not in path or not file.is_file():
            return self._answer(
                404, b"{}", {"X-Error-Code": "EntryNotFound" if "/resolve/" in path else "RepoNotFound"}
            )
        data, byte_range = file.read_bytes(), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if byte_range is None:
            return self._answer(200, data, commit)
        begin, end = int(byte_range[1]), min(int(byte_range[2]) + 1, len(data))
        return self._answer(206, data[begin:end], {**commit, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"})

    do_HEAD = do_GET


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """Serve a folder as the repository org/NAME of a Hub; yield its address."""

    class Handler(_HubHandler):
        root = folder

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
