"""Replicas of an HTTP server with OpenAI's API on Ray, and a streamed answer. Needs spec_compile[serve,ray].

python examples/ray_serve.py [--device cuda] [--model MODEL --algo eagle3 --draft DRAFT] [--replicas 4] [--stay]

On a cluster, start Ray on every machine (`ray start`) and run this on one of them; it joins that cluster.
"""

import argparse
import json
import signal
import urllib.request
from pathlib import Path

import ray
from ray import serve

from spec_compile.serve.ray import app

MODEL = Path(__file__).parent / "tiny_coder"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--algo", default="ngram")
    parser.add_argument("--draft")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--replicas", type=int, default=1, help="at most; Ray starts them as requests come")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C")
    options = parser.parse_args()

    ray.init(ignore_reinit_error=True, include_dashboard=False)
    serve.start(http_options={"port": options.port})
    speculation = {"compile": not options.eager} | ({"draft": options.draft} if options.draft else {})
    # Ray adds a replica when more requests run on each than one replica answers at little extra time for each.
    scaling = {"min_replicas": 1, "max_replicas": options.replicas, "target_ongoing_requests": 8}
    serve.run(
        app(options.model, options.algo, options=speculation, device=options.device, autoscaling_config=scaling),
    )

    question = {"prompt": "def mean(values):\n", "max_tokens": 48, "stream": True}
    url = f"http://127.0.0.1:{options.port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(question).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as stream:
        lines = [b"data: [DONE]\n", b"\n"]
        for line in (line for line in stream if line not in lines):
            chunk = json.loads(line.removeprefix(b"data: "))
            print(chunk["choices"][0]["text"], end="", flush=True)
    print("\naccept length", chunk["metrics"]["speculative_decoding"]["mean_acceptance_length"])
    if options.stay:
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()


if __name__ == "__main__":
    main()
