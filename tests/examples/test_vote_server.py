"""The page of the example takes votes, and after Ctrl-C the model is trained on them."""

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

from server_parts import START_S, Client
from tunesmith.collect.web.access import API

SCRIPT = Path(__file__).parents[2] / "examples" / "vote_server.py"


def log_in(login_url: str) -> Client:
    """A client with the session that the link on the console opens."""
    parts = urlsplit(login_url)
    client = Client(f"{parts.scheme}://{parts.netloc}")
    token = re.search(r"token=([^&]+)", login_url).group(1)
    answer = client.send("POST", f"{API}/session", {"token": token})
    assert answer.status == 200, answer.body
    client.token = re.match(r"[^=]+=([^;]+)", answer.headers["set-cookie"]).group(1)
    return client


def test_votes_are_collected_exported_and_learnt(tmp_path):
    words = [sys.executable, str(SCRIPT), "--folder", str(tmp_path / "votes"), "--port", "0", "--steps", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    assert process.stdout.readline() == "6 pairs to judge, 0 were there already\n"
    client = log_in(re.search(r"http\S+(?=;)", process.stdout.readline()).group())
    timer.cancel()
    for _ in range(3):
        (shown,) = client.next(1)
        assert client.vote(shown["token"]).status == 200
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "3 votes in" in printed
    assert re.search(r"DPO: accuracy [\d.]+ on the votes", printed)
    rows = [json.loads(line) for line in (tmp_path / "votes" / "votes.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["chosen"] != row["rejected"] for row in rows)
