"""A judge behind TLS: trusted, not trusted, under another name, and a server that does not speak it."""

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from judge_server import JudgeServer
from tunesmith.base.core.errors import InputError
from tunesmith.engine.rollout.remote.server import Server
from tunesmith.learn.judges.judge import Judge, PairText, PairVerdict, Unjudged

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")

JudgeMaker = Callable[..., Judge]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that signed itself, with its key."""
    folder = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=judge -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    return folder


@pytest.fixture
def secure(certificate: Path) -> Iterator[JudgeServer]:
    """A judge's server with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    made = JudgeServer(tls=context)
    yield made
    made.close()


def refused(judge: Judge, pairs: list[PairText], server: JudgeServer) -> str:
    """Why `judge` asked nothing; it must not have waited, nor counted a cost."""
    found = judge.pairs(pairs)
    assert all(isinstance(one, Unjudged) and one.kind == "fatal" for one in found), found
    assert server.num_requests == 0
    assert (judge.answers.costs.num_requests, judge.answers.costs.num_tokens) == (0, 0)
    return str(found[0])


@pytest.mark.parametrize("settings", [{}, {"served_model": "rater-1"}])
def test_a_certificate_that_is_not_trusted_ends_at_once(
    secure: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText], settings: dict[str, object]
) -> None:
    said = refused(judge_of(model=secure.url, **settings), pairs, secure)
    assert "its certificate is not trusted: self" in said and "SSL_CERT_FILE" in said


def test_one_that_is_trusted_is_asked_under_its_own_name_alone(
    secure: JudgeServer,
    certificate: Path,
    judge_of: JudgeMaker,
    pairs: list[PairText],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    other = judge_of(model=secure.url.replace("127.0.0.1", "localhost"), served_model="rater-1")
    assert "not valid for 'localhost'" in refused(other, pairs, secure)
    found = judge_of(model=secure.url).pairs(pairs)
    assert all(isinstance(one, PairVerdict) for one in found) and secure.num_requests == 12


def test_a_server_without_tls_is_not_waited_for(
    server: JudgeServer, judge_of: JudgeMaker, pairs: list[PairText]
) -> None:
    judge = judge_of(model=server.url.replace("http:", "https:"), served_model="rater-1")
    assert "it speaks no TLS; give an address with http://" in refused(judge, pairs, server)


def test_a_rollout_server_is_not_waited_for_either(secure: JudgeServer, server: JudgeServer) -> None:
    for url, message in (
        (secure.url, "its certificate is not trusted"),
        (server.url.replace("http:", "https:"), "it speaks no TLS"),
    ):
        with pytest.raises(InputError, match=message):
            Server(url, timeout_s=60, num_slots=1).absence()
