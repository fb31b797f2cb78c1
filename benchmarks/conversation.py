"""A conversation of an agent over HTTP, with drafts and without: tokens a second, and the time to the first token.

    python -m benchmarks.conversation --model FOLDER [--new-tokens 512] [--repeats 3] [--threads 2] [--json FILE]

prompts/agent_turns.json has ten requests of mini-swe-agent, which changes a file of itsdangerous and writes it whole
each time; request k is its first 2 + 2k messages. Two servers take turns, one drafts n-grams and one takes plain steps.
Both answer each request greedily and must give the same bytes. "turns" sums up the ten requests: tokens a second and
their ratio. The history is the recorded one, and the answers are the model's: one of at least --new-tokens is cut off.

"cold s" is the time to the first token of the last request of which nothing is kept, "later s" the median of the
requests after the first one. "later over cold" should be 0.15 at most and "over plain" 2 at least. Each repeat has its
own salt, so that nothing of an earlier one is kept; figures are medians.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from benchmarks.common import PROMPTS, command_line, save_rows, show_rows, stamp

TURNS = PROMPTS / "agent_turns.json"
KINDS = {"drafts": {}, "plain": {"num_draft_tokens": 1}}
"""The servers, and the options of speculate() of each."""


@contextmanager
def serving(model: Path, options: dict, threads: int):
    """A client of a server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["serve", str(model), "--port", str(port), "--slots", "1", "--options", json.dumps(options)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen([sys.executable, "-m", "spec_compile", *arguments], env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            while True:
                if process.poll() is not None:
                    raise RuntimeError("the server did not start; its output has the reason")
                try:
                    client.get("/health").raise_for_status()
                    break
                except httpx.TransportError:
                    time.sleep(0.5)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def ask(client: httpx.Client, messages: list[dict], new_tokens: int, salt: str) -> dict:
    """The text of an answer, its tokens, and the seconds to its first token and to its end."""
    body = {"messages": messages, "max_tokens": new_tokens, "temperature": 0, "stream": True, "cache_salt": salt}
    body["stream_options"] = {"include_usage": True}
    begin, first, text, usage = time.perf_counter(), None, [], {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.perf_counter() - begin
                    text.append(piece)
    seconds = time.perf_counter() - begin
    return {"text": "".join(text), "tokens": usage["completion_tokens"], "first": first, "seconds": seconds}


def replay(clients: dict[str, httpx.Client], messages: list[dict], new_tokens: int, salt: str) -> dict[str, list[dict]]:
    """The answers of each server to each request. RuntimeError if the servers do not give the same."""
    answers: dict[str, list[dict]] = {kind: [] for kind in clients}
    for turn, end in enumerate(range(2, len(messages) + 1, 2)):
        for kind in clients if turn % 2 == 0 else reversed(clients):
            answers[kind].append(ask(clients[kind], messages[:end], new_tokens, salt))
        texts = [each[-1]["text"] for each in answers.values()]
        if len({*texts}) > 1:
            raise RuntimeError(f"turn {turn + 1}: drafts change the answer: {texts}")
    return answers


def figures(answers: dict[str, list[dict]], cold: float) -> dict[str, float]:
    """The row of one replay."""
    rates = {
        kind: sum(each["tokens"] for each in given) / sum(each["seconds"] for each in given)
        for kind, given in answers.items()
    }
    later = statistics.median(each["first"] for each in answers["drafts"][1:])
    return {
        "tokens": sum(each["tokens"] for each in answers["drafts"]),
        "tokens/s": rates["drafts"], "plain tokens/s": rates["plain"], "over plain": rates["drafts"] / rates["plain"],
        "cold s": cold, "later s": later, "later over cold": later / cold,
        "last over cold": answers["drafts"][-1]["first"] / cold,
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, "conversation.json", threads=2)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a chat template")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    messages, rows = json.loads(TURNS.read_text()), []
    with serving(options.model, KINDS["drafts"], options.threads) as drafts:
        with serving(options.model, KINDS["plain"], options.threads) as plain:
            clients = {"drafts": drafts, "plain": plain}
            for client in clients.values():  # code of large prompts is compiled before anything is timed
                ask(client, messages, 1, "warm up")
            for repeat in range(options.repeats):
                cold = ask(drafts, messages, 1, f"cold {repeat}")["first"]
                rows.append(figures(replay(clients, messages, options.new_tokens, f"turns {repeat}"), cold))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = {"model": options.model.name, "device": device.type, "turns": len(messages) // 2}
    row |= {name: round(statistics.median(each[name] for each in rows), 4) for name in rows[0]}
    show_rows([row], [*row])
    save_rows(options.json, [row], ("model", "device", "turns"), stamp(device))


if __name__ == "__main__":
    main()
