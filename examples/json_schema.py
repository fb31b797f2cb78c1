"""JSON by a schema: a grammar of xgrammar (`pip install xgrammar`) permits tokens, drafts make decoding fast.

python examples/json_schema.py [--eager]      # --eager: do not compile, which starts sooner and runs slower
"""

import sys
from pathlib import Path

import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer
from xgrammar.contrib.hf import LogitsProcessor

import spec_compile

MODEL = Path(__file__).parent / "tiny_coder"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "values": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "values"],
}
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
fast = spec_compile.speculate(model, algo="ngram", compile="--eager" not in sys.argv)

info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
grammar = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA)

inputs = tokenizer('default = {"name": "mean", "values": [1, 2, 3]}\nresult = ', return_tensors="pt")
output = fast.generate(**inputs, max_new_tokens=64, logits_processor=[LogitsProcessor(grammar)])  # one for every call
print(tokenizer.decode(output[0], skip_special_tokens=True), fast.speculation.stats, sep="\n")
