"""Published model shapes with random weights, the bytes that their rounds move, and text for them."""

import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.common import DEMO_MODEL, PROMPTS, read_prompts
from benchmarks.rounds.quantised_shapes import QUANTISED
from spec_compile.inventory import held_items, held_tensors

LLAMA_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=8192)  # fmt: skip
DENSE = {
    "llama-8b": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256,
                               num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
                               rope_parameters=dict(rope_theta=500000.0, **LLAMA_ROPE))),
    "qwen3-8b": ("qwen3", dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, vocab_size=151936,
                               num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                               max_position_embeddings=40960,
                               rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    "llama-1b": ("llama", dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, vocab_size=128256,
                               num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
                               max_position_embeddings=131072,
                               rope_parameters=dict(rope_theta=500000.0, **{**LLAMA_ROPE, "factor": 32.0}))),
    "qwen3-0.6b": ("qwen3", dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, vocab_size=151936,
                                 num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                                 tie_word_embeddings=True, max_position_embeddings=40960,
                                 rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    "smollm2-135m": ("llama", dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49152,
                                   num_attention_heads=9, num_key_value_heads=3, head_dim=64,
                                   tie_word_embeddings=True, max_position_embeddings=8192,
                                   rope_parameters=dict(rope_type="default", rope_theta=100000.0))),
}  # fmt: skip
NEMOTRON_LAYERS = [
    {"M": "linear_attention", "-": "mlp", "*": "full_attention"}[letter]
    for letter in "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
]
"""The layers of Nemotron-H-8B, as published."""
HYBRIDS = {
    "qwen3-next-80b": ("qwen3_next", dict(num_hidden_layers=32, vocab_size=151936, max_position_embeddings=262144)),
    "qwen3.5-9b": ("qwen3_5_text", dict(max_position_embeddings=262144)),
    "falcon-h1-7b": ("falcon_h1", dict(hidden_size=3072, intermediate_size=12288, num_hidden_layers=44,
                                       num_attention_heads=12, num_key_value_heads=2, head_dim=128, vocab_size=130048,
                                       mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256,
                                       max_position_embeddings=262144)),
    "nemotron-h-8b": ("nemotron_h", dict(layers_block_type=NEMOTRON_LAYERS, hidden_size=4096,
                                         intermediate_size=21504, num_key_value_heads=8, mamba_num_heads=128,
                                         max_position_embeddings=8192)),
    "lfm2-1.2b": ("lfm2", dict(hidden_size=2048, intermediate_size=12288, num_hidden_layers=16,
                               full_attn_idxs=[2, 5, 8, 10, 12, 14], num_attention_heads=32, num_key_value_heads=8)),
}  # fmt: skip
"""Models with recurrences or short convolutions; sizes that are not named are transformers' own. Qwen3-Next-80B-A3B has
32 of its 48 layers, which fit into 141 GB."""
EXPERTS = {
    "qwen3-30b-a3b": ("qwen3_moe", dict(num_hidden_layers=48, head_dim=128, norm_topk_prob=True,
                                        max_position_embeddings=40960,
                                        rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    "gpt-oss-20b": ("gpt_oss", dict(num_hidden_layers=24, num_local_experts=32)),
    "mixtral-8x7b": ("mixtral", dict(max_position_embeddings=32768)),
}  # fmt: skip
"""Mixtures of experts."""
SHAPES = DENSE | HYBRIDS | EXPERTS
SHAPES |= {name: SHAPES[shape] for name, (shape, *_) in QUANTISED.items()}
"""Name -> model type and sizes."""
IDENTITY = 64.0
"""Standard deviation of a mixture's embedding. The random layers add less than 10 to the residual stream, nearly the
same for all tokens, so that each layer's router sees mainly the token itself."""

TEXT_TREE = [
    -1, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27,
    27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 0, 0, 0, 0, 44, 45, 46, 47, 1, 48, 48, 48, 48, 48, 48, 49, 50, 51,
    52, 53,
]  # fmt: skip
"""Parents of the nodes that n-grams propose after 3,824 tokens of `text_tokens`. The tree has 15 tail tiles, its first
16 nodes have 4; three of four such trees have no more."""


def build(name: str, device: str = "cuda", layers: int | None = None) -> PreTrainedModel:
    """A model of the named shape with small random weights, in bfloat16 or in the format of `QUANTISED`.

    layers: their number in place of the shape's own.

    The embedding of a mixture has large weights, see `IDENTITY`.
    """
    shape, dtype, quantise = QUANTISED.get(name, (name, torch.bfloat16, None))
    model_type, sizes = SHAPES[shape]
    config = AutoConfig.for_model(model_type, **(sizes | ({"num_hidden_layers": layers} if layers else {})))
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if distinct_experts(model, 1) is not None:
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=IDENTITY)
    if quantise:
        quantise(model)
    return model.eval()


def text_tokens(count: int, vocab: int, model: str | Path = DEMO_MODEL) -> torch.Tensor:
    """The first `count` tokens of all prompts of the benchmarks, joined and repeated, by the tokenizer of `model`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = "\n".join(text for file in sorted(PROMPTS.glob("*.jsonl")) for text in read_prompts(file, 100))
    ids = torch.tensor(tokenizer(texts, verbose=False).input_ids)
    return ids.repeat(-(-count // len(ids)))[:count] % vocab


def stored_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters and buffers."""
    return sum({id(tensor): tensor.nbytes for tensor in held_tensors(model)}.values())


def distinct_experts(model: PreTrainedModel, rows: int) -> float | None:
    """The expected number of experts of a layer that `rows` tokens choose, uniformly and independently.

    None if the model is no mixture. 8 experts, of which a token chooses 2, and 3 tokens give 8 * (1 - 0.75 ** 3) = 4.6.
    """
    chosen = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None)
    layers = (part for path, part in model.named_modules() if path.endswith(".experts"))
    first = next(layers, None) if chosen else None
    if first is None:
        return None
    total = len(next(first.parameters()))
    return total * (1 - (1 - chosen / total) ** rows)


def weight_bytes(model: PreTrainedModel, rows: int = 1, count: float | None = None) -> int:
    """Bytes of the parameters and buffers that a step over `rows` tokens reads.

    An embedding that is not tied to the output head does not count, because only a few rows of it are read. `count`
    experts of each layer count; None: as many as `distinct_experts` expects.
    """
    expected, read = distinct_experts(model, rows), dict[int, float]()
    count = expected if count is None else count
    for path, part in model.named_modules():
        is_expert = expected is not None and path.endswith(".experts")
        for _, tensor in (*held_items(part._parameters), *held_items(part._buffers)):
            if tensor is not None:
                read[id(tensor)] = tensor.nbytes * (count / len(tensor) if is_expert else 1.0)
    is_tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    return int(sum(read.values())) - (0 if is_tied else model.get_input_embeddings().weight.nbytes)


def state_bytes(graph) -> int:
    """Bytes of the recurrent and convolutional states of one sequence in a `ModelGraph`."""
    return sum(math.prod(spec.state) * (spec.dtypes[0] or graph.dtype).itemsize for spec in graph.recurrences)


def context_bytes(graph, context: int) -> int:
    """Bytes of the keys and values of a context that a step reads; a sliding window reads only its own."""
    sizes = [layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in graph.layers]
    seen = sum(size * min(context, layer.window or context) for size, layer in zip(sizes, graph.layers))
    return graph.token_bytes * seen // sum(sizes) if sizes else 0


def read_bytes(
    fast: PreTrainedModel, context: int, batch: int = 1, nodes: int = 1, count: float | None = None
) -> int:  # fmt: skip
    """Bytes that a round must move: weights, keys and values of the context, and states, read and written.

    count: as in `weight_bytes`.
    """
    graph = fast.speculation.engine.runtime.verify
    return weight_bytes(fast, batch * nodes, count) + (context_bytes(graph, context) + 2 * state_bytes(graph)) * batch


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, if all layers of the model attend."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 * model.dtype.itemsize
