"""A server with the interface of the Hugging Face hub, as far as uploads use it, in a thread."""

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

TOKEN = "hf_QmVmb3JlVGhlRW5kT2ZUaGVEYXk"
LARGE = (".safetensors", ".gguf")
"""Files that are sent apart from the commit, as the hub's .gitattributes has them."""


@dataclass
class Repository:
    """A repository: its visibility, and the files of each commit."""

    visibility: str
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{".gitattributes": b"*.safetensors filter=lfs\n"}])
    titles: list[str] = field(default_factory=lambda: ["initial commit"])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    @property
    def head(self) -> str:
        return f"{len(self.commits):040x}"

    def write_to(self, folder: Path) -> Path:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


@dataclass
class HubState:
    """What the server has, was asked, and is to do wrong."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    breaks_at: str = ""
    """Content that never arrives whole: the connection ends in its middle."""
    breaks_after_commit: bool = False
    """The connection ends when a commit was made, before it is answered."""
    fails: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By a part of the path: status and text that are answered instead."""
    may_write: bool = True
    is_busy: bool = False
    """Somebody else commits while files are sent."""


class _Handler(BaseHTTPRequestHandler):
    state: HubState
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def handle_one(self) -> None:
        self.state.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if path.startswith("/stored/"):
            return self.store(path.rpartition("/")[2])
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "Invalid username or password.")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if failure := next((self.state.fails[part] for part in self.state.fails if part in path), None):
            return self.send(failure[1].encode(), failure[0])
        if path == "/api/whoami-v2":
            return self.answer({"type": "user", "name": "alice", "orgs": []})
        if path == "/api/validate-yaml":
            return self.validate(json.loads(body)["content"])
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body)["objects"])
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        repository = self.state.repositories.get(name)
        if repository is None:
            return self.refuse(404, "Repository not found", "RepoNotFound")
        if "resolve" in parts:
            return self.send_file(repository, "/".join(parts[4:]))
        if parts[4:5] == ["preupload"]:
            return self.preupload(repository, json.loads(body)["files"])
        if parts[4:5] == ["commit"]:
            return self.commit(name, repository, [json.loads(line) for line in body.splitlines()])
        siblings = [{"rfilename": file} for file in repository.files]
        is_private = repository.visibility == "private"
        return self.answer({"id": name, "sha": repository.head, "private": is_private, "siblings": siblings})

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def store(self, oid: str) -> None:
        size = int(self.headers["Content-Length"])
        if oid == self.state.breaks_at:
            self.rfile.read(size // 2)
            self.close_connection = True
            self.connection.close()
            return
        content = self.rfile.read(size)
        if hashlib.sha256(content).hexdigest() != oid:
            return self.refuse(400, "the content is another")
        self.state.stored[oid] = content
        return self.answer({})

    def validate(self, text: str) -> None:
        begin, front, _ = text.split("---\n", 2)
        assert begin == ""
        if not isinstance(yaml.safe_load(front).get("tags"), list):
            self.answer({"errors": [{"message": "tags is no list"}], "warnings": []}, 400)
        self.answer({"errors": [], "warnings": []})

    def create(self, asked: dict) -> None:
        name = f"{asked['organization'] or 'alice'}/{asked['name']}"
        if not self.state.may_write or not name.startswith("alice/"):
            return self.refuse(403, "You don't have the rights to create a model under this namespace")
        if name in self.state.repositories:
            return self.refuse(409, "You already created this model repo")
        self.state.repositories[name] = Repository(asked["visibility"])
        return self.answer({"url": f"{self.state.url}/{name}", "id": name})

    def preupload(self, repository: Repository, asked: list[dict]) -> None:
        if self.state.is_busy:
            repository.commits.append({**repository.files, "theirs": b""})
        files = [
            {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular"} for one in asked
        ]
        self.answer({"files": [{**one, "shouldIgnore": False} for one in files]})

    def batch(self, asked: list[dict]) -> None:
        if not self.state.may_write:
            return self.refuse(403, "You don't have the rights to write to this repository")
        objects = []
        for one in asked:
            action = {"upload": {"href": f"{self.state.url}/stored/{one['oid']}"}}
            objects.append(one if one["oid"] in self.state.stored else {**one, "actions": action})
        return self.answer({"transfer": "basic", "objects": objects})

    def commit(self, name: str, repository: Repository, lines: list[dict]) -> None:
        files = dict(repository.files)
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, repository.head):
            return self.refuse(412, "A commit has happened since. Please refresh and try again.")
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.stored[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        repository.commits.append(files)
        repository.titles.append(header["summary"])
        if self.state.breaks_after_commit:
            self.close_connection = True
            return self.connection.close()
        return self.answer(
            {"commitUrl": f"{self.state.url}/{name}/commit/{repository.head}", "commitOid": repository.head}
        )

    def send_file(self, repository: Repository, path: str) -> None:
        content = repository.files[path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", repository.head)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer(self, values: object, status: int = 200) -> None:
        self.send(json.dumps(values).encode(), status)

    def send(self, text: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Message", message)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving() -> Generator[HubState]:
    """The state of a server that listens on a free port."""
    state = HubState()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
