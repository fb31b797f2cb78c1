"""Seconds until the first token of generate(), in a new process: with empty caches, and with what that start left.

    python -m benchmarks.host.cold_start [--layers 4 30] [--device cpu] [--shape NAME] [--model FOLDER] [--algo eagle3]
        [--ready] [--json FILE]

A Llama with random weights: hidden size 576, vocabulary 49,152, float32 on a CPU and bfloat16 on a GPU, which with 30
layers is the shape of SmolLM2-135M; or a shape of rounds/shapes.py, or a model from a folder. Drafts are n-grams, or
with --algo eagle3 trees of 16 nodes of a head with random weights, and n-grams in them. The clock starts at
speculate(), after the model is loaded.
"imports" is the time to import torch and transformers, "own imports" that of spec_compile after them. With --ready,
calls of 24 tokens follow until everything that they use is compiled in the background, adopted and captured;
"tokens/s eager" is the median of the calls before that, "tokens/s ready" of five calls after it. "transformers" is the
first token of its own generate(), and "in tokens" the number of tokens that it generates while speculate() runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 64
TOKENS = 60
"""Tokens of transformers that `speculate` is compared with."""
SCRIPT = "benchmarks.host.cold_start"


def one_start(options) -> dict[str, float]:
    """The seconds of this process."""
    begin = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.generation.streamers import BaseStreamer

    imported = time.perf_counter()
    import spec_compile

    result = {"imports": imported - begin, "own imports": time.perf_counter() - imported}
    from benchmarks.rounds.shapes import build

    class FirstToken(BaseStreamer):
        at = None
        calls = 0

        def put(self, value):
            self.calls += 1
            if self.calls == 2:  # the first call is the prompt
                self.at = time.perf_counter()

        def end(self):
            pass

    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    elif options.shape:
        model = build(options.shape)
    else:
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=options.layers[0],
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(options.device, dtype).eval()
    ids = torch.randint(3, 1000, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    settings = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, eos_token_id=None)
    begin, streamer = time.perf_counter(), FirstToken()
    model.generate(ids, max_new_tokens=4, streamer=streamer, **settings)
    result["transformers"] = streamer.at - begin
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, **settings)
    token_seconds = (time.perf_counter() - begin) / TOKENS
    draft: dict[str, Any] = {}
    if options.algo != "ngram":
        from benchmarks.rounds.drafts import TREE, make

        draft = dict(TREE, ngram=True, draft=make(options.algo, model).to(model.dtype))
    begin, streamer = time.perf_counter(), FirstToken()
    fast = spec_compile.speculate(model, options.algo, **draft)
    result["speculate"] = time.perf_counter() - begin
    result["in tokens"] = result["speculate"] / token_seconds
    fast.generate(ids, max_new_tokens=4, streamer=streamer, **settings)
    result["first_token"] = streamer.at - begin
    result |= {stage: seconds for stage, seconds in fast.speculation.seconds.items()}
    if options.ready:

        def rate() -> float:
            tick = time.perf_counter()
            fast.generate(ids, max_new_tokens=24, **settings)
            return 24 / (time.perf_counter() - tick)

        tiers, rates = fast.speculation.engine.runtime.cold_start, [rate()]
        while tiers.waits:
            rates.append(rate())
        rate()  # captures what was adopted
        result["ready"] = time.perf_counter() - begin
        result["tokens/s eager"] = statistics.median(rates)
        result["tokens/s ready"] = statistics.median(rate() for _ in range(5))
    return result


def measure(options, layers: int, cache: str) -> dict[str, float]:
    """The same in a new process with `cache` as the folder of its compiler cache."""
    arguments = ["--layers", str(layers), "--device", options.device, "--algo", options.algo, "--one"]
    arguments += ["--shape", options.shape] if options.shape else []
    arguments += ["--model", options.model] if options.model else []
    arguments += ["--ready"] if options.ready else []
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    environment["SPEC_COMPILE_CACHE"] = f"{cache}/starts"
    done = subprocess.run([sys.executable, "-m", SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 30])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", help="a shape of rounds/shapes.py, on a GPU, instead of the small Llama")
    parser.add_argument("--model", help="a folder for from_pretrained(), instead of the small Llama")
    parser.add_argument("--algo", default="ngram", choices=["ngram", "eagle3"])
    parser.add_argument("--ready", action="store_true", help="also the time until what calls use is compiled")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_start(options)))
        return
    rows = []
    for layers in options.layers if not (options.shape or options.model) else [0]:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                shape = options.shape or Path(options.model or f"{layers} layers").name
                row = {"shape": shape, "algo": options.algo, "device": options.device, "cache": state}
                rows.append(row | measure(options, layers, cache))
                seconds = ", ".join(f"{name} {value:.2f}" for name, value in rows[-1].items() if type(value) is float)
                print(f"{shape}, {options.algo}, {state}: {seconds}", flush=True)
    if options.json:
        import torch  # here, so that a measured process does not import them

        from benchmarks.common import save_rows, stamp

        save_rows(options.json, rows, ("shape", "algo", "device", "cache"), stamp(torch.device(options.device)))


if __name__ == "__main__":
    main()
