#!/usr/bin/env bash
# The wheel as people install it, without the extra `dev`, in an environment of its own that is removed afterwards:
# one step of SFT, of a reward model and of GRPO. Then the extras of docs/install.md, and a vote page that is served.
# Options are those of make: PYTHON and TORCH_INDEX of the environment, where set.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT
unset PYTHONPATH
export HF_HUB_OFFLINE=1 TUNESMITH_CACHE="$work/cache"

"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --quiet)
"${pip[@]}" wheel --no-deps --wheel-dir "$work" "$root"
"${pip[@]}" install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$root/constraints.txt")"
wheel=$(echo "$work"/tunesmith-*.whl)
"${pip[@]}" install -c "$root/constraints.txt" "$wheel"

cd "$work"
for word in one two three four five; do
    echo "{\"prompt\": \"Say $word.\", \"completion\": \" $word\"}" >>told.jsonl
    echo "{\"prompt\": \"Say $word.\", \"chosen\": \" $word\", \"rejected\": \" no\"}" >>pairs.jsonl
done
tunesmith=$work/venv/bin/tunesmith
"$tunesmith" doctor
"$tunesmith" train sft --model tiny:llama --steps 1 --demonstrations told.jsonl
"$tunesmith" train reward --model tiny:llama --steps 1 --pairs pairs.jsonl --pairs.heldout-fraction 0.25
"$tunesmith" train grpo --model tiny:llama --steps 1 --prompts told.jsonl --reward unique_chars

"${pip[@]}" install -c "$root/constraints.txt" "${wheel}[lora,web]"
"$tunesmith" train sft --model tiny:llama --model.lora.rank 2 --steps 1 --demonstrations told.jsonl
"$tunesmith" votes import pairs.jsonl --dir campaign
"$tunesmith" serve --dir campaign --port 0 >served.txt 2>&1 &
server=$!
for _ in $(seq 100); do
    address=$(grep -om1 'http://[^ ]*' served.txt) && break
    sleep 0.2
done
"$work/venv/bin/python" -c 'import sys, urllib.request as r; print(sys.argv[1], r.urlopen(sys.argv[1]).status)' "$address"
echo "the wheel trains and serves without the extra dev"
