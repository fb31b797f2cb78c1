"""Seconds until the first token of generate(), in a new process: with an empty compiler cache, and with a full one.

    python -m benchmarks.host.cold_start [--layers 4 32] [--device cpu] [--shape NAME] [--algo ngram] [--json FILE]

A Llama with random weights: hidden size 576, vocabulary 49,152, float32 on a CPU and bfloat16 on a GPU; or a shape of
rounds/shapes.py. The clock starts at speculate(), after the model is loaded; "imports" is the time to import the
libraries. "ready" is the time until every size of a round is compiled and captured (`speculation.warmup()`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT_TOKENS = 64
SCRIPT = "benchmarks.host.cold_start"


def one_start(options) -> dict[str, float]:
    """The seconds of this process."""
    begin = time.perf_counter()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.generation.streamers import BaseStreamer

    import spec_compile
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

    imported = time.perf_counter() - begin
    if options.shape:
        model = build(options.shape)
    else:
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=options.layers[0],
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
        )  # fmt: skip
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        model = LlamaForCausalLM(config).to(options.device, dtype).eval()
    ids = torch.randint(3, 1000, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    begin, streamer = time.perf_counter(), FirstToken()
    fast = spec_compile.speculate(model, options.algo)
    speculated = time.perf_counter() - begin
    fast.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4, streamer=streamer)
    result = {"imports": imported, "speculate": speculated, "first_token": streamer.at - begin}
    if options.ready:
        fast.speculation.warmup()
        result["ready"] = time.perf_counter() - begin
    return result


def measure(options, layers: int, cache: str) -> dict[str, float]:
    """The same in a new process with `cache` as the folder of its compiler cache."""
    arguments = ["--layers", str(layers), "--device", options.device, "--algo", options.algo, "--one"]
    arguments += ["--shape", options.shape] if options.shape else []
    arguments += ["--ready"] if options.ready else []
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    done = subprocess.run([sys.executable, "-m", SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", help="a shape of rounds/shapes.py, on a GPU, instead of the small Llama")
    parser.add_argument("--algo", default="ngram")
    parser.add_argument("--ready", action="store_true", help="also the time until every size of a round is compiled")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_start(options)))
        return
    rows = []
    for layers in options.layers if not options.shape else [0]:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                row = {"shape": options.shape or f"{layers} layers", "device": options.device, "cache": state}
                rows.append(row | measure(options, layers, cache))
                seconds = ", ".join(f"{name} {value:.1f} s" for name, value in rows[-1].items() if type(value) is float)
                print(f"{row['shape']}, {state}: {seconds}", flush=True)
    if options.json:
        import torch  # here, so that a measured process does not import them

        from benchmarks.common import save_rows, stamp

        save_rows(options.json, rows, ("shape", "device", "cache"), stamp(torch.device(options.device)))


if __name__ == "__main__":
    main()
