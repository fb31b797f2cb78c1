"""Answers a file of prompts with Ray Data. Needs spec_compile[ray].

python examples/ray_data.py PROMPTS.jsonl ANSWERS.jsonl [--device cuda] [--model MODEL --algo ALGO] [--actors 4]

PROMPTS has a JSON object with "id" and "prompt" in each line. If it is stopped and started again, it answers only the
prompts without an answer in ANSWERS.
"""

import argparse
import json
import os
from pathlib import Path

import ray

from spec_compile.serve.ray import Answers

MODEL = Path(__file__).parent / "tiny_coder"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--algo", default="ngram")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--actors", type=int, default=1, help="models that are loaded, each on a GPU of its own")
    parser.add_argument("--batch-size", type=int, default=256, help="prompts an actor is given at once")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args()

    # A last line without its end was being written when the job was stopped. Its prompt is answered again.
    options.answers.touch()
    whole, end, _ = options.answers.read_bytes().rpartition(b"\n")
    os.truncate(options.answers, len(whole + end))
    answered = {json.loads(line)["id"] for line in whole.splitlines()}
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    rows = [row for row in rows if row["id"] not in answered]
    print(f"{len(answered)} prompts have answers, {len(rows)} are left")

    if rows:
        ray.init(ignore_reinit_error=True, include_dashboard=False)
        settings = {"model": options.model, "algo": options.algo, "device": options.device}
        speculation = {"options": {"compile": not options.eager}, "max_new_tokens": options.new_tokens}
        results = ray.data.from_items(rows).map_batches(
            Answers, fn_constructor_kwargs=settings | speculation, batch_size=options.batch_size,
            compute=ray.data.ActorPoolStrategy(size=options.actors), num_gpus=int(options.device == "cuda"),
        )  # fmt: skip
        with options.answers.open("a") as file:
            for row in results.iter_rows():
                file.write(json.dumps(row) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
