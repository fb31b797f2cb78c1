"""Does a server answer your requests in the same way with drafts and without? Prints each difference.

python examples/compare_drafts.py requests.jsonl --url http://localhost:8000/v1

A line of the file is the body of a chat: {"messages": [...], "tools": [...], "tool_choice": "required", ...}.
"""

import argparse
import json
import time

from openai import OpenAI


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", help="a file with the body of a chat in each line")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="of the server's API")
    parser.add_argument("--seed", type=int, default=0, help="of requests that have none")
    return parser.parse_args()


def ask(client: OpenAI, body: dict, **speculation: bool) -> tuple[dict, float]:
    """The parts of an answer that drafts may not change, and the seconds that it took."""
    began = time.perf_counter()
    answer = client.post("/chat/completions", body={**body, "stream": False, **speculation}, cast_to=object)
    (choice,) = answer["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
    parts = {"content": choice["message"].get("content"), "tool_calls": calls, "ends by": choice["finish_reason"]}
    return parts | {"tokens": answer["usage"]["completion_tokens"]}, time.perf_counter() - began


def main() -> None:
    args = parse()
    client = OpenAI(base_url=args.url, api_key="unused", timeout=600)
    with open(args.requests, encoding="utf-8") as lines:
        bodies = [{"seed": args.seed} | json.loads(line) for line in lines if line.strip()]
    differing, calls, seconds = 0, 0, [0.0, 0.0]
    for number, body in enumerate(bodies, 1):
        (drafted, first), (plain, second) = ask(client, body), ask(client, body, speculation=False)
        seconds = [seconds[0] + first, seconds[1] + second]
        calls += len(plain["tool_calls"])
        changed = [name for name in plain if drafted[name] != plain[name]]
        differing += bool(changed)
        for name in changed:
            print(f"request {number}, {name}: {drafted[name]!r} with drafts, {plain[name]!r} without")
    print(f"{len(bodies)} requests, {calls} tool calls, {differing} answers differ")
    print(f"{seconds[0]:.1f} seconds with drafts, {seconds[1]:.1f} without")
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
