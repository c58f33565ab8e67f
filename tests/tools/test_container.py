"""The Dockerfile keeps its rules, its steps are those of CI, and the health check knows a server that answers."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import container_health
from server_parts import Server

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and argument of each instruction, with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name.upper(), rest.strip()) for name, _, rest in (line.strip().partition(" ") for line in joined)]


def broken_rules(text: str) -> set[str]:
    """Which of the project's rules for Dockerfiles this one breaks."""
    found = instructions(text)
    arguments = dict(rest.partition("=")[::2] for name, rest in found if name == "ARG")
    stages = {rest.split()[2] for name, rest in found if name == "FROM" and len(rest.split()) == 3}
    bases = [
        re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], rest.split()[0]) for n, rest in found if n == "FROM"
    ]
    last = found[max(place for place, (name, _) in enumerate(found) if name == "FROM") :]
    users = [rest for name, rest in last if name == "USER"]
    broken = set()
    for base in set(bases) - stages:
        if not re.fullmatch(r"[\w./-]+:[\w.-]*\d{8}[\w.-]*|[\w./:-]+@sha256:[0-9a-f]{64}", base):
            broken.add("base")
    if not users or users[-1].split(":")[0] in ("root", "0") or not re.fullmatch(r"\d+:\d+", users[-1]):
        broken.add("user")
    if not any(name == "HEALTHCHECK" and "CMD" in rest for name, rest in last):
        broken.add("health")
    if not any(name == "LABEL" and "org.opencontainers.image.version=" in rest for name, rest in last):
        broken.add("labels")
    for name, rest in found:
        if name == "ADD":
            broken.add("add")
        if (
            name == "RUN"
            and re.search(r"apt-get|container\.sh packages", rest)
            and "rm -rf /var/lib/apt/lists/*" not in rest
        ):
            broken.add("apt")
    return broken


GOOD = (ROOT / "Dockerfile").read_text()


def test_the_dockerfile_keeps_the_rules():
    assert broken_rules(GOOD) == set()


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("debian:bookworm-20250520-slim", "debian:latest", "base"),
        ("debian:bookworm-20250520-slim", "debian", "base"),
        ("USER 10001:10001\n", "USER 10001:10001\nUSER root\n", "user"),
        ("USER 10001:10001\n", "", "user"),
        ("HEALTHCHECK", "# HEALTHCHECK", "health"),
        ("org.opencontainers.image.version", "version", "labels"),
        ("COPY src src", "ADD https://example.org/src.tar src", "add"),
        (" && rm -rf /var/lib/apt/lists/*", "", "apt"),
    ],
)
def test_each_rule_catches_its_violation(old: str, new: str, rule: str):
    assert old in GOOD
    assert broken_rules(GOOD.replace(old, new)) == {rule}


def test_labels_extras_and_copied_files_are_those_of_the_project():
    found = instructions(GOOD)
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', GOOD))
    assert labels["version"] == PROJECT["version"]
    assert labels["licenses"] == PROJECT["license"]
    assert labels["documentation"] == PROJECT["urls"]["Documentation"]
    extras = next(rest.partition("=")[2] for name, rest in found if name == "ARG" and rest.startswith("EXTRAS="))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    copied = {word for name, rest in found if name == "COPY" for word in rest.split()[:-1]}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent
    assert all((ROOT / word).exists() for word in copied)


def test_the_development_container_is_a_stage_of_the_dockerfile_and_its_user():
    config = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    stage = GOOD.split(f" AS {config['build']['target']}\n")[1].split("\nFROM")[0]
    assert re.search(r"^USER (\d+):", stage, re.MULTILINE)[1] in (ROOT / "tools" / "container.sh").read_text()
    assert config["remoteUser"] in (ROOT / "tools" / "container.sh").read_text()
    assert config["postCreateCommand"].startswith("make .venv")


def test_ci_runs_the_steps_of_the_dockerfile():
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "tools/container.sh packages development" in commands
    assert "make .venv" in commands


def test_an_unknown_step_is_an_error_that_names_the_known_ones():
    done = subprocess.run([ROOT / "tools" / "container.sh", "pakages"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "packages [development] | user" in done.stderr


@pytest.mark.parametrize(
    ("words", "port"),
    [
        (["serve"], "8000"),
        (["serve", "--port", "9000", "--login"], "9000"),
        (["serve", "--port=9000"], "9000"),
        (["serve", "--port", "0"], None),
        (["watch", "RUN"], "8001"),
        (["train", "ppo"], None),
        ([], None),
    ],
)
def test_the_health_check_knows_where_a_command_answers(words: list[str], port: str | None):
    assert container_health.port_of(words) == port


def processes_of(folder: Path, *lines: list[str]) -> Path:
    for number, words in enumerate(lines, start=1):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "cmdline").write_text("\0".join([*words, ""]))
    return folder


def test_the_health_check_finds_tunesmith_among_the_processes(tmp_path: Path):
    folder = processes_of(
        tmp_path,
        ["/bin/sh", "-c", "sleep 1"],
        ["/opt/tunesmith/.venv/bin/python", "/opt/tunesmith/.venv/bin/tunesmith", "serve", "--dir", "live"],
        ["grep", "a", "b", "tunesmith"],
    )
    assert [words[:3] for words in container_health.commands(folder)] == [["serve", "--dir", "live"]]


def test_a_server_is_healthy_while_it_answers_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = Server(tmp_path / "live").start()
    try:
        port = server.url.rpartition(":")[2]
        monkeypatch.setattr(container_health, "commands", lambda: [["serve", f"--port={port}"]])
        assert container_health.problem() == ""
    finally:
        server.stop()
    assert f"port {port} does not answer" in container_health.problem()


def test_without_tunesmith_the_container_is_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(container_health, "commands", lambda: [])
    assert container_health.problem() == "no tunesmith runs"
