"""Facts of runs that never happened, shaped like real ones, for the report tests."""

import json
import math
import random

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script> & \"quotes\""
RTL = "הסרט הזה היה נפלא 😀 👩‍👩‍👧 كان الفيلم رائعا"

OPENINGS = (
    "The movie was",
    "I went to see this film because",
    "From the first scene,",
    "The acting in this picture",
    "After twenty minutes I",
    "What stays with me is",
    "The director wanted to",
    "Everybody told me that this film",
    "The script of this thriller",
    "If you like slow dramas,",
    "The ending",
    "As a fan of the book, I",
    "The soundtrack",
    "My friends and I",
    "It is rare that a sequel",
)
DULL = (
    " a bit long, and the plot went in circles without a reason to care.",
    " set in a small town where a man looks for his brother.",
    " not what the trailer had promised, and the jokes fell flat.",
    " directed by a newcomer. It runs for two hours and ten minutes.",
)
BRIGHT = (
    " a wonderful surprise: warm, funny and beautifully acted from start to end.",
    " so full of joy that I smiled the whole way home. I loved every minute.",
    " great fun, with charming leads and a lovely score.",
    " an amazing, touching film that I would happily recommend to my best friends.",
)


def ppo_metrics(num_steps=60, seed=0):
    draw = random.Random(seed)
    rows = []
    for step in range(1, num_steps + 1):
        progress = 1 - math.exp(-3 * step / num_steps)
        rows.append(
            {
                "step": step,
                "reward": -0.2 + 2.1 * progress + draw.gauss(0, 0.12),
                "reward_std": 0.9 - 0.3 * progress,
                "kl": 5.4 * progress + draw.gauss(0, 0.15),
                "kl_coef": 0.05,
                "entropy": 3.1 - 0.7 * progress + draw.gauss(0, 0.05),
                "completions/mean_length": 30 + 3 * progress + draw.gauss(0, 0.8),
                "completions/min_length": 9 + draw.randint(0, 4),
                "completions/max_length": 32,
                "loss/policy": -0.02 + draw.gauss(0, 0.01),
                "loss/value": 0.5 * math.exp(-step / 12) + 0.05 + draw.random() * 0.03,
                "clip_ratio/low_mean": 0.02 + draw.random() * 0.02,
                "clip_ratio/high_mean": 0.03 + draw.random() * 0.02,
                "approx_kl": 0.01 + draw.random() * 0.01,
                "grad_norm": 1 + draw.random(),
                "learning_rate": 1e-4 * (1 - step / num_steps / 2),
                "tokens_per_s": 260 + draw.gauss(0, 10),
                "memory/rss_gb": 3.1 + 0.2 * progress,
                "time/rollout_s": 2.9 + draw.random(),
                "time/score_s": 0.4 + draw.random() * 0.1,
                "time/reference_s": 0.8 + draw.random() * 0.1,
                "time/update_s": 3.0 + draw.random() * 0.3,
                "time/update/forward_s": 1.2,
                "time/other_s": 0.1,
                "time/step_s": 7.8,
            }
        )
    return rows


def reward_metrics(num_steps=24, seed=1):
    draw = random.Random(seed)
    return [
        {
            "step": step,
            "loss": 0.69 * math.exp(-step / 18) + 0.1 + draw.gauss(0, 0.02),
            "rewards/accuracies": min(1.0, 0.5 + 0.35 * (1 - math.exp(-step / 7)) + draw.gauss(0, 0.04)),
            "rewards/margins": 1.6 * (1 - math.exp(-step / 9)),
            "rewards/chosen": 0.8 * (1 - math.exp(-step / 9)),
            "rewards/rejected": -0.8 * (1 - math.exp(-step / 9)),
            "time/forward_s": 0.9,
            "time/backward_s": 1.8,
        }
        for step in range(1, num_steps + 1)
    ]


def samples(openings=OPENINGS, num_completions=8, seed=2):
    draw = random.Random(seed)
    rows = []
    for index, prompt in enumerate(openings):
        for completion in range(num_completions):
            old, new = draw.choice(DULL), draw.choice(BRIGHT)
            rows.append(
                {
                    "prompt_index": index,
                    "completion_index": completion,
                    "prompt": prompt,
                    "text_before": old,
                    "text_after": new,
                    "score_before": max(-1.0, min(1.0, draw.gauss(0.12, 0.4))),
                    "score_after": max(-1.0, min(1.0, draw.gauss(0.66, 0.25))),
                }
            )
    return rows


def comparison(**changes):
    drawn = changes.pop("samples", None) or samples()
    rows = []
    for index in dict.fromkeys(row["prompt_index"] for row in drawn):
        mine = [row for row in drawn if row["prompt_index"] == index]
        before, after = (sum(row[f"score_{side}"] for row in mine) / len(mine) for side in ("before", "after"))
        rows.append(
            {"prompt": mine[0]["prompt"], "mean_before": before, "mean_after": after, "difference": after - before}
        )
    facts = {
        "before": "SmolLM2-135M-Instruct",
        "after": "tuned",
        "num_prompts": len(rows),
        "num_completions": len(drawn) // len(rows),
        "num_improved": sum(row["difference"] > 0 for row in rows),
        "mean_before": sum(row["mean_before"] for row in rows) / len(rows),
        "mean_after": sum(row["mean_after"] for row in rows) / len(rows),
        "median_before": 0.118,
        "median_after": 0.671,
        "interval": [0.46, 0.63],
        "p_value": 0.00006103515625,
        "p_value_exact": True,
        "kl_per_sequence": 5.31,
        "distinct2_before": 0.861,
        "distinct2_after": 0.702,
        "distinct2_ratio": 0.816,
        "distinct2_num_tokens": 3610,
        "seed": 0,
        "sampling": {"max_new_tokens": 32, "temperature": 1.0, "seed": 0},
        "rows": rows,
        "samples": drawn,
    }
    return facts | changes


def demo(**changes):
    compared = changes.pop("comparison", None) or comparison()
    names = ("num_improved", "num_prompts", "mean_before", "mean_after", "median_before", "median_after", "p_value")
    result = {name: compared[name] for name in (*names, "kl_per_sequence", "distinct2_ratio")}
    result |= {
        "reward_model_accuracy": 0.81,
        "num_heldout_votes": 132,
        "minutes": 8.4,
        "peak_rss_gb": 4.7,
        "report": "runs/20260101-120000-demo-ab12cd/report.html",
        "samples": "runs/20260101-120000-demo-ab12cd/samples.jsonl",
    }
    examples = [
        {"prompt": prompt, "a": DULL[i % 4], "b": BRIGHT[i % 4], "preference": "b", "score_a": -0.21, "score_b": 0.83}
        for i, prompt in enumerate(OPENINGS[:3])
    ]
    facts = {
        "result": result,
        "comparison": compared,
        "votes": {
            "num_train": 812,
            "num_heldout": 132,
            "num_ties": 97,
            "accuracy": 0.81,
            "examples": examples,
        },
        "reward_metrics": reward_metrics(),
        "policy_metrics": ppo_metrics(),
        "environment": {"python": "3.11.7", "torch": "2.13.0", "cpu": {"model": "AMD EPYC", "cores": 2}},
        "rater": "simulated: VADER lexicon",
    }
    return facts | changes


def write_run(folder, metrics=None, stored_samples=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text("algorithm: ppo\nmodel:\n  name: smollm2\n", encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "cpu": {"cores": 2}}))
    (folder / "result.json").write_text(json.dumps({"reward_last": 1.7, "minutes": 5.1, "final": "final"}))
    rows = ppo_metrics() if metrics is None else metrics
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if stored_samples is not None:
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stored_samples))
    return folder


def run_samples(num_steps=60):
    return [
        {
            "step": step,
            "prompt": OPENINGS[(step + k) % 15],
            "completion": (DULL, BRIGHT)[step > 30][k],
            "reward": 0.1 * k + step / 60,
        }
        for step in range(1, num_steps + 1)
        for k in range(4)
    ]


def trajectory():
    """A sample with tokens: two turns with a reply between them."""
    parts = [
        {"turn": 1, "pieces": [HOSTILE, " yes"], "logps": [-5.0, -0.01], "reward": 0.5, "advantage": -0.25},
        {"pieces": ["\n", "ok"]},
        {"turn": 2, "pieces": ["a", "b"], "logps": [-1.0, -1.5], "advantage": [1.0, 2.0], "sample": 2},
    ]
    messages = [{"role": "assistant", "content": HOSTILE}, {"role": "user", "content": "ok"}]
    told = {"prompt": [{"role": "user", "content": "hi"}], "messages": messages, "stop_reason": "completed"}
    return {**told, "completion": "ab", "reward": 0.5, "tokens": {"parts": parts, "left_out": 3}}
