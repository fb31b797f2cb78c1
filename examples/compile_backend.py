"""The passes for your own loop: ``torch.compile(backend="spec")`` on a forward that scores texts.

python examples/compile_backend.py [--layers 8]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spec_compile import backend

MODEL = Path(__file__).parent / "tiny_coder"
TEXTS = ["def mean(values):\n    return sum(values) / len(values)\n", "values mean def return len sum"]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="layers of the demo model that are used (of 8)")
    options = parser.parse_args()
    config = AutoConfig.from_pretrained(MODEL, num_hidden_layers=options.layers)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, config=config, dtype="float32")
    step = torch.compile(model, backend="spec", options={"merge_linears": True})

    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt", padding="max_length", max_length=24, truncation=True).input_ids
        expected = model(ids, use_cache=False).logits
        logits = step(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], ignore_index=tokenizer.pad_token_id)
        print(f"{loss:.2f} nats a token: {text!r}")
        print(f"  largest difference of a logit: {float((logits - expected).abs().max()):.1e}")

    for graph in backend.reports():  # what the passes changed
        for report in graph:
            print(f"{report.name:22} {report.nodes_before:5} -> {report.nodes_after:5}  {report.summary}")


if __name__ == "__main__":
    main()
