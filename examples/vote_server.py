"""Votes of people on a model's answers, and a model that learns from them: draw, vote in the browser, train by DPO.

    python examples/vote_server.py
    python examples/vote_server.py --model smollm2 --prompts films --steps 50

Draws two answers to each prompt, prints the address of the page where they are judged, and waits. Ctrl-C ends the page:
then the number of votes is printed, the votes are written to FOLDER/votes.jsonl, and the model is trained on them;
the last line is the accuracy on the votes at the last step.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import tunesmith as ts

PROMPTS = ("The film was", "Once upon a time", "I liked", "The music", "My day", "In the end")


def items_of(groups: Sequence[ts.Group]) -> list[ts.NewItem]:
    """The pairs of completions that differ, without NUL, which a database cannot hold; the page shuffles the sides."""
    found: list[ts.NewItem] = []
    for group in groups:
        texts = dict.fromkeys(completion.text.replace("\0", "") for completion in group.completions)
        if len(texts) > 1:
            found.append(ts.NewItem(group.prompt.content, tuple(map(ts.Candidate, texts))))
    return found


def main() -> None:
    """Draw, serve until Ctrl-C, train."""
    parser = argparse.ArgumentParser(description="Collect votes on a model's answers and train on them.")
    parser.add_argument("--model", default="tiny:llama", help="hub id, folder, GGUF file, smollm2 or tiny:<family>")
    parser.add_argument("--prompts", help="a file with a prompt column, or films; six short openings without it")
    parser.add_argument("--folder", type=Path, default=Path("votes"), help="votes and runs")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--steps", type=int, default=5, help="of DPO")
    options = parser.parse_args()

    loaded = ts.load_policy(options.model)
    engine = ts.open_engine(loaded.model, loaded.tokenizer)
    prompts = ts.load_prompts(options.prompts or PROMPTS)
    items = items_of(engine.generate(prompts, 2, ts.SamplingParams(max_new_tokens=24, seed=0)))
    settings = ts.ServerSettings(options.folder, port=options.port)

    def add_items(votes: ts.VoteStore, campaign_id: int) -> None:
        done = votes.import_items(campaign_id, items)
        print(f"{done.num_new} pairs to judge, {done.num_there} were there already")

    with suppress(KeyboardInterrupt):
        ts.serve(
            settings,
            fill=add_items,
            announce=lambda opened: print(f"vote at {opened.url}{opened.login}; Ctrl-C ends", flush=True),
        )

    file = options.folder / "votes.jsonl"
    with closing(ts.VoteReader.open(settings.votes_place)) as reader:
        num_votes = ts.write_votes(file, reader.export(), "jsonl")
    print(f"{num_votes} votes in {file}")
    if num_votes:
        result = ts.train.dpo(
            model=options.model,
            pairs=str(file),
            steps=options.steps,
            progress=False,
            run={"dir": str(options.folder / "runs")},
        )
        print(f"DPO: accuracy {result.metrics[-1]['rewards/accuracies']:.2f} on the votes, model in {result.run_dir}")


if __name__ == "__main__":
    main()
