"""Tokens a second of a model with its last layers in the host's memory, or with its layers spread over several GPUs:
transformers' own loop, and ours with n-grams.

    python -m benchmarks.host_layers --model FOLDER [--host-layers 16] [--new-tokens 128] [--prompt TEXT]
    python -m benchmarks.host_layers --model FOLDER --gpus 2 [--no-cuda-graphs]

Without --host-layers, half of the layers are there. Layers must have transformers' usual names. --gpus 1 has the whole
model on one GPU, for comparison.
"""

from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import spec_compile
from benchmarks import common


def main(arguments: list[str] | None = None) -> None:
    parser = common.command_line(__doc__)
    parser.add_argument("--model", required=True, help="a folder or a name on the Hub")
    parser.add_argument("--host-layers", type=int, help="number of layers in the host's memory")
    parser.add_argument("--gpus", type=int, default=0, help="spread the layers over this number of GPUs instead")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="do not capture rounds")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt", default="Write a function that sorts a list of numbers, and explain each line.")
    options = parser.parse_args(arguments)
    count = AutoConfig.from_pretrained(options.model).get_text_config().num_hidden_layers
    on_host = count // 2 if options.host_layers is None else options.host_layers
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), 0)
    places |= {f"model.layers.{layer}": "cpu" if layer >= count - on_host else 0 for layer in range(count)}
    if options.gpus:
        places |= {f"model.layers.{layer}": layer * options.gpus // count for layer in range(count)}
        places |= dict.fromkeys(("model.norm", "lm_head"), options.gpus - 1)
    places = places if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", device_map=places)
    fast = spec_compile.speculate(model, cuda_graphs=not options.no_cuda_graphs)
    fast.speculation.warmup()
    inputs = AutoTokenizer.from_pretrained(options.model)(options.prompt, return_tensors="pt").to(fast.device)
    for name, system in (("transformers", model), ("ours, n-gram", fast)):
        run = partial(system.generate, **inputs, do_sample=False, max_new_tokens=options.new_tokens)
        output, seconds = min((common.elapsed(run, fast.device) for _ in range(3)), key=lambda pair: pair[1])
        print(f"{name:14} {(output.shape[1] - inputs.input_ids.shape[1]) / seconds:8.1f} tokens a second")


if __name__ == "__main__":
    main()
