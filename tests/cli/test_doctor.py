"""`tunesmith doctor`: what is there is said, what is broken or hangs is a finding, and nothing changes."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tunesmith.apps.cli import doctor
from tunesmith.apps.cli.main import main
from tunesmith.base.core.extras import EXTRA_OF
from tunesmith.base.runs.environment import file_system, why_not_writable
from tunesmith.engine.kernels.native import operations

Capture = pytest.CaptureFixture[str]
Findings = dict[str, doctor.Finding]

FAKE_GPU = """
class version:
    cuda = "12.8"

class cuda:
    class device:
        def __init__(self, index): pass
        def __enter__(self): pass
        def __exit__(self, *error): pass

    class Facts:
        name, major, minor = "Fake H200", 9, 0

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    get_device_properties = staticmethod(lambda index: cuda.Facts)
    is_bf16_supported = staticmethod(lambda including_emulation: True)
    mem_get_info = staticmethod(lambda index: (100e9, 141e9))

def get_num_threads():
    return 4
"""


def found() -> Findings:
    return {finding.name: finding for finding in doctor.examine()}


def give_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A package torch that a process started from here finds before the real one."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_every_part_of_the_machine_is_named_and_nothing_heavy_loaded(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom tunesmith.apps.cli.main import main\nassert main(['doctor', '--json']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    findings = {row["name"]: doctor.Finding(**row) for row in json.loads(done.stdout)["findings"]}
    named = (
        *("system", "python", "torch", "transformers", "datasets", "pyarrow", "torch threads", "cpu"),
        *("waiting threads", "bf16"),
        *("memory", "disk", "file system", "run folder", "compiler", "hub", "cache", "smollm2"),
    )
    assert {*named, *(f"kernel {op}" for op in operations())} <= set(findings)
    assert findings["torch"].value == metadata.version("torch")
    assert findings["run folder"].value == f"{tmp_path} can be written and locked"
    assert any(name.startswith("gpu") for name in findings)
    assert all(finding.advice for finding in findings.values() if finding.status != "ok")
    assert list(tmp_path.iterdir()) == []


def test_what_is_untested_is_said_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    untested = {finding.name: finding for finding in doctor._untested()}
    assert set(untested) - {"untested: bf16"} == {"untested: GPU", "untested: systems", "untested: Python"}
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "19", "0"))
    monkeypatch.setattr("tunesmith.base.runs.environment.cpu_flags", lambda: frozenset({"amx_bf16"}))
    monkeypatch.setattr(doctor, "_has_gpu", lambda: False)
    assert {f.name: f.status for f in doctor._untested()}["untested: GPU"] == "ok"  # nothing to warn of here
    monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
    untested = {finding.name: finding for finding in doctor._untested()}
    assert all(finding.status == "note" for finding in untested.values())
    assert "this is Darwin" in untested["untested: systems"].value
    assert untested["untested: Python"].value == "this one, 3.19"
    assert "bfloat16 on this processor" in untested["untested: bf16"].value


def test_bf16_follows_the_flags_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.base.runs.environment.cpu_flags", lambda: frozenset({"avx512_bf16", "amx_bf16"}))
    assert doctor._processor()[1].value == "AVX512-BF16, AMX-BF16; models compute in bfloat16"
    monkeypatch.setattr("tunesmith.base.runs.environment.cpu_flags", frozenset)
    assert doctor._processor()[1].value == "not in hardware; models compute in float32"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ImportError('libcuda.so.1: cannot open')", "ImportError: libcuda.so.1: cannot open"),
        ("raise SystemExit(7)", "its process ended with code 7"),
        ("import os; os.abort()", "its process ended with code -6"),
        ("import time; time.sleep(600)", "no answer within 3 s; it may hang"),
    ],
    ids=["fails", "exits", "crashes", "hangs"],
)
def test_a_torch_that_cannot_be_imported_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, code: str, problem: str
) -> None:
    give_torch(tmp_path, monkeypatch, code)
    if "sleep" in code:
        monkeypatch.setattr(doctor, "_PROBE_TIMEOUT_S", 3)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in facts["findings"]}
    assert problem in findings["torch check"]["value"]
    assert findings["torch check"]["status"] == "missing"
    assert findings["smollm2 check"]["status"] == "note"
    assert {"cpu", "disk", "compiler", "untested: GPU"} <= set(findings)
    assert facts["ok"] is False


def test_what_torch_said_before_the_gpu_hung_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = FAKE_GPU.replace("lambda: True", "lambda: __import__('time').sleep(600)")
    give_torch(tmp_path, monkeypatch, code)
    monkeypatch.setattr(doctor, "_PROBE_TIMEOUT_S", 8)  # it has to start and answer before, on a busy machine too
    threads, problem = doctor._ask_probe("torch", "missing", "advice")
    assert threads == doctor.Finding("torch threads", "4")
    assert "may hang" in problem.value


def test_a_gpu_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_torch(tmp_path, monkeypatch, FAKE_GPU)
    _, gpu = doctor._ask_probe("torch", "missing", "advice")
    expected = "Fake H200, 100.0 of 141.0 GB free, compute capability 9.0, bf16"
    assert gpu == doctor.Finding("gpu 0", expected)


def test_files_of_the_current_folder_do_not_stand_in_for_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    assert "torch check" not in {finding.name for finding in doctor._ask_probe("torch", "missing", "advice")}


def test_a_part_that_breaks_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def broken() -> dict[str, str]:
        raise RuntimeError("no such table\nsecond line")

    monkeypatch.setattr("psutil.virtual_memory", broken)
    monkeypatch.setattr(doctor, "_ask_probe", lambda *_: [])
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "memory             cannot be looked at: no such table\n" in text
    assert "second line" not in text
    assert "run folder" in text


def test_a_folder_that_is_gone_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(doctor, "_ask_probe", lambda *_: [])
    assert "cannot be looked at" in found()["current folder"].value


def test_a_package_of_a_wrong_version_is_missing_and_one_that_is_optional_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def versions() -> dict[str, str | None]:
        return {"torch": "1.0", "pydantic": None, "gguf": None, "numpy": metadata.version("numpy")}

    monkeypatch.setattr("tunesmith.base.runs.environment.package_versions", versions)
    monkeypatch.setattr("tunesmith.base.runs.environment.package_version", lambda name: None)
    findings = {finding.name: finding for finding in doctor._packages()}
    assert (findings["torch"].status, findings["torch"].value) == ("missing", "1.0, not <3,>=2.11")
    assert findings["pydantic"].status == "missing"
    assert findings["numpy"].status == "ok"
    for name in ("gguf", "peft", "fastapi", "datasets", "pyarrow", "tensorboard", "ray", "trl", "lm_eval"):
        assert findings[name].status == "note"
        assert f"tunesmith[{EXTRA_OF[name]}]" in findings[name].advice


def test_a_folder_that_cannot_hold_a_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_writable(tmp_path) == ""
    assert why_not_writable(tmp_path / "none") == "No such file or directory"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tunesmith.base.runs.environment.why_not_writable", lambda folder: "Read-only file system")
    findings = {finding.name: finding for finding in doctor._current_folder()}
    assert findings["run folder"].value == f"no run can be kept in {tmp_path}: Read-only file system"
    assert "--run.dir" in findings["run folder"].advice
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "status"), [("ext4", "ok"), ("nfs4", "note"), ("fuse.sshfs", "note"), ("xfs", "ok")])
def test_a_file_system_over_the_network_is_noted(monkeypatch: pytest.MonkeyPatch, kind: str, status: str) -> None:
    monkeypatch.setattr("tunesmith.base.runs.environment.file_system", lambda folder: kind)
    findings = {finding.name: finding for finding in doctor._current_folder()}
    assert (findings["file system"].value.split(",")[0], findings["file system"].status) == (kind, status)


def test_the_nearest_mount_says_the_kind_of_file_system() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path.cwd()) != ""


@pytest.mark.parametrize(
    ("value", "part"), [("1", "HF_HUB_OFFLINE is set"), ("", "may be asked"), ("0", "may be asked")]
)
def test_the_hub_is_not_asked_only_whether_it_may_be(monkeypatch: pytest.MonkeyPatch, value: str, part: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    (finding,) = doctor._hub()
    assert part in finding.value
    assert finding.value.endswith("(not tried now)")
