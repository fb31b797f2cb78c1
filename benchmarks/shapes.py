"""Model shapes with random weights, and text for them."""

import math
from pathlib import Path

import torch
from common import DEMO_MODEL, HERE, read_prompts
from expert_shapes import EXPERTS
from hybrid_shapes import HYBRIDS
from quantised_shapes import QUANTISED
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

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
SHAPES = DENSE | HYBRIDS | EXPERTS
SHAPES |= {name: SHAPES[shape] for name, (shape, *_) in QUANTISED.items()}
"""Name -> model type and sizes."""
IDENTITY = 64.0
"""Standard deviation of a mixture's embedding. The random layers add less than 10 to the residual stream of these
shapes, most of it alike for all tokens, so that each layer's router sees above all which token it has."""

TEXT_TREE = [
    -1, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27,
    27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 0, 0, 0, 0, 44, 45, 46, 47, 1, 48, 48, 48, 48, 48, 48, 49, 50, 51,
    52, 53,
]  # fmt: skip
"""Parents of what n-grams propose behind 3,824 tokens of `text_tokens`. It has 15 tail tiles, its first 16 nodes
have 4; three of four such trees have no more."""


def build(name: str, device: str = "cuda") -> PreTrainedModel:
    """A model of the named shape with small random weights, in bfloat16 or as `QUANTISED` says; the embedding of a
    mixture has large ones, see `IDENTITY`."""
    shape, dtype, quantise = QUANTISED.get(name, (name, torch.bfloat16, None))
    kind, sizes = SHAPES[shape]
    config = AutoConfig.for_model(kind, **sizes)
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
    """Tokens of the benchmark's own prompts, by the tokenizer of `model`, end to end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = "\n".join(text for file in sorted((HERE / "prompts").glob("*.jsonl")) for text in read_prompts(file, 100))
    ids = torch.tensor(tokenizer(texts, verbose=False).input_ids)
    return ids.repeat(-(-count // len(ids)))[:count] % vocab


def stored_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters and buffers."""
    return sum({id(tensor): tensor.nbytes for tensor in held_tensors(model)}.values())


def distinct_experts(model: PreTrainedModel, rows: int) -> float | None:
    """How many experts of a layer `rows` tokens are expected to choose, if all are chosen alike often and
    independently; None: the model is no mixture."""
    chosen = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None)
    layers = (part for path, part in model.named_modules() if path.endswith(".experts"))
    first = next(layers, None) if chosen else None
    if first is None:
        return None
    total = len(next(first.parameters()))
    return total * (1 - (1 - chosen / total) ** rows)


def weight_bytes(model: PreTrainedModel, rows: int = 1, count: float | None = None) -> int:
    """Bytes of the weights that a step over `rows` tokens reads: all parameters and buffers.

    But of an embedding of its own, rows are read, which do not count; and of a layer's experts, `count` on average, or
    if they were not counted `distinct_experts`.
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
    """Bytes of the states of one sequence in the recurrences and convolutions of a `ModelGraph`."""
    return sum(math.prod(spec.state) * (spec.dtypes[0] or graph.dtype).itemsize for spec in graph.recurrences)


def context_bytes(graph, context: int) -> int:
    """Bytes of the keys and values of a context that a step reads: of sliding windows, the last ones."""
    sizes = [layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in graph.layers]
    seen = sum(size * min(context, layer.window or context) for size, layer in zip(sizes, graph.layers))
    return graph.token_bytes * seen // sum(sizes) if sizes else 0


def read_bytes(
    fast: PreTrainedModel, context: int, batch: int = 1, nodes: int = 1, count: float | None = None
) -> int:  # fmt: skip
    """Bytes that a round must move: weights, keys and values of the context, and states, read once and written once.
    count: as of `weight_bytes`."""
    graph = fast.speculation.engine.runtime.verify
    return weight_bytes(fast, batch * nodes, count) + (context_bytes(graph, context) + 2 * state_bytes(graph)) * batch


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, of a model whose layers all attend."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 * model.dtype.itemsize
