"""What a newly installed wheel must do: import, generate without a compiler, and show its demo.

    python tests/support/smoke.py examples/tiny_coder

It is a script and no test, because it runs in the environment of the wheel, outside the source tree.
"""

import os
import sys

os.environ["CXX"] = os.environ["CC"] = "/nonexistent"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile
from spec_compile.__main__ import main as command
from spec_compile.contrib.terminal.demo import PACKAGE, demo_model


def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    inputs = tokenizer("def mean(values):\n", return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    for algo, options in (("ngram", {}), ("eagle3", {"draft": f"{folder}/heads/eagle3"})):
        fast = spec_compile.speculate(model, algo=algo, compile=False, **options)
        assert torch.equal(fast.generate(**inputs, max_new_tokens=32, do_sample=False), plain)
        print(f"{algo}: the same tokens, accept length {fast.speculation.stats.accept_length:.2f}")
    assert demo_model().parent == PACKAGE, demo_model()
    assert command(["demo", "--new-tokens", "16", "--device", "cpu"]) == 0
    try:
        spec_compile.speculate(model, compile=True)
    except ValueError as error:
        assert "C++ compiler" in str(error) and "compile=False" in str(error), error
        print(f"compile=True: {error}")
    else:
        raise AssertionError("compile=True was not refused, although there is no compiler")


if __name__ == "__main__":
    main(sys.argv[1])
