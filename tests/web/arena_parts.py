"""A live loop with three versions, and a process that answers for them without a model. Importing this replaces the
process that draws.

A version says its name in capitals, so that a test can tell the sides apart. Some messages have it do something else.
"""

import json
import sys
import time
from pathlib import Path

from tunesmith.collect.store.records import PolicyVersion
from tunesmith.collect.store.runs import RunStore
from tunesmith.collect.web import drawing

WORKER = r"""
import json, os, sys, time
NAMES = {"v000000": "ALPHA", "v000001": "BETA", "v000002": "GAMMA"}
(HOSTILE, TOO_LONG), parent = json.loads(sys.argv[1]), os.getppid()
for line in sys.stdin:
    request = json.loads(line)
    if "stop" in request:
        continue
    messages = request.get("messages") or [{"role": "user", "content": request["text"]}]
    id, name, said = request["id"], os.path.basename(request["model"]["name"]), messages[-1]["content"]
    name = NAMES.get(name, name.upper())
    def reply(**facts):
        print(json.dumps({"id": id, **facts}), flush=True)
    if said.startswith("wait for "):
        while os.getppid() == parent and not os.path.exists(said[9:]):
            time.sleep(0.01)
    if said.startswith("die until ") and not os.path.exists(said[10:]):
        os._exit(9)
    if said == "no model" and name == "GAMMA":
        reply(error="there is no model v000002", kind="model")
        continue
    if said == "full" and len(messages) > 3:
        reply(error=TOO_LONG, kind="prompt")
        continue
    if said == "too long":
        reply(error="prompt 7 has 900 tokens", kind="prompt")
        continue
    text = f" {name} hears {said}"
    text = f" {name}\x00" if said == "nul" else text
    text = " the same" if said == "same" else HOSTILE[name == "GAMMA"] if said == "hostile" else text
    # Without a chat template: one text.
    whole = "".join(("\n" if one["role"] == "user" and k else "") + one["content"] for k, one in enumerate(messages))
    reply(begun={"prompt": whole, "prompt_ids": [7], "context": 128})
    if said == "die in it":
        os._exit(9)
    if said == "half an answer":
        reply(sample=0, text="half")
        reply(sample=0, answer={"text": "half"})
        reply(done=True)
        continue
    is_calling = bool(request.get("tools")) and said.startswith("ask ")
    if is_calling:
        reply(sample=0, thinking="Hm.", text="Let me")
        reply(sample=0, text=" see.")
    for start in range(0, 0 if is_calling else len(text), 6):
        reply(sample=0, text=text[start : start + 6])
    answer = {"text": text, "prompt": whole, "token_ids": [1, 2], "logps": [-1.0, -2.0], "drawn_logps": [-0.5, -1.0]}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": said[4:]}}}
    calling = {"role": "assistant", "reasoning_content": "Hm.", "content": "Let me see.", "tool_calls": [call, call]}
    message = calling if is_calling else None
    reply(sample=0, answer={**answer, "finish_reason": "stop", "message": message})
    reply(done=True)
"""

TOO_LONG = "the conversation is longer than a model's context; leave out its oldest turns"
HOSTILE = ("<img src=x onerror=\"document.title='owned'\">", "</script><script>document.title='owned'</script>")


def command(**_: object) -> list[str]:
    return [sys.executable, "-S", "-c", WORKER, json.dumps([HOSTILE, TOO_LONG])]


drawing.command = command


def make_loop(folder: Path, num_versions: int = 3) -> Path:
    """The folder of a live loop that serves its last version."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = "algorithm: live\nmodel: {name: base, trust_remote_code: true}\nrollout: {max_new_tokens: 24}\n"
    (folder / "recipe.yaml").write_text(recipe)
    with RunStore.open(folder / "runs.db") as store:
        for version in range(num_versions):
            path = folder / "versions" / f"v{version:06d}"
            path.mkdir(parents=True, exist_ok=True)
            last = version == num_versions - 1
            store.add_version(PolicyVersion(version, time.time(), path=str(path) if version else "", serving=last))
    return folder
