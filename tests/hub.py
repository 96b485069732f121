"""A stand-in for the Hugging Face Hub on loopback: serves what is below a folder by the Hub's own protocol.

A folder owner/name is a data set and a model, whichever is asked for.
"""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
C4_CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
---
"""


def write_c4(root: Path, **splits: list[bytes]) -> None:
    """allenai/c4 with these .json.gz files in its splits train and validation."""
    folder = root / "allenai" / "c4" / "en"
    folder.mkdir(parents=True)
    (folder.parent / "README.md").write_text(C4_CARD)
    for split, files in splits.items():
        for i, content in enumerate(files):
            (folder / f"c4-{split}.{i:05d}-of-{len(files):05d}.json.gz").write_bytes(content)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path  # holds owner/name/file
    requests: list[str]

    def do_GET(self):
        self.requests.append(self.path)
        url = urlparse(self.path)
        path = unquote(url.path)
        if match := re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            if (self.root / match[1]).is_dir():
                return self.send_json({"id": match[1], "sha": COMMIT, "private": False, "tags": [], "siblings": []})
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if match := re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)/tree/[^/]+/?(.*)", path):
            repository = self.root / match[1]
            if (repository / match[2]).is_dir():
                found = (repository / match[2]).glob("**/*" if "recursive=true" in url.query.lower() else "*")
                return self.send_json([self.entry(repository, file) for file in sorted(found)])
        if match := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            if (self.root / match[1] / match[2]).is_file():
                return self.send_file(self.root / match[1] / match[2])
        self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def send_file(self, file: Path):
        content, status = file.read_bytes(), 200
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self.send(status, content, headers)

    def send_json(self, value):
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str]):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def entry(self, repository: Path, file: Path) -> dict:
        kind, size = ("directory", 0) if file.is_dir() else ("file", file.stat().st_size)
        return {"type": kind, "path": str(file.relative_to(repository)), "size": size, "oid": "0" * 40}

    def log_message(self, *_):
        pass


@contextmanager
def serving(root: Path):
    """(address, the paths requested so far) of a Hub with these repositories."""
    requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (Handler,), {"root": root, "requests": requests}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
