"""Logits of all nodes of random trees have the bits that plain steps along each node's path give; with exact="request"
keys, values and logits after a prompt have them, too, whatever its chunks, neighbours and known beginnings.

On a GPU models have the widths of published ones, two layers and random weights; on a CPU they are tiny, in float32,
where sums are only nearly equal.
"""

import functools
import gc
import itertools
import random

import models
import pytest
import torch
from batch_requests import collect, managed
from hybrids import bits_of_answers
from places import GPU, ON_GPU
from rows import begin_rows
from transformers import AutoConfig, AutoModelForCausalLM

import spec_compile
from spec_compile.batching.pages import pages_of
from spec_compile.cache import PAGE, ROUNDED, Cache
from spec_compile.runtime.session import Session, StepKind
from spec_compile.tree import ancestry

EDGES = (1, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2047, 2048, 2049)
"""Committed tokens: those around the ends of chunks and of spans."""

ROPE = dict(rope_type="default", rope_theta=10000.0)
WINDOW, FULL = "sliding_attention", "full_attention"
GEMMA = dict(hidden_size=2304, intermediate_size=9216, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
             layer_types=[WINDOW, FULL])  # fmt: skip
WIDTHS = {
    "8B": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)),
    "1B": ("llama", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
                         tie_word_embeddings=True)),
    "0.6B": ("qwen3", dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
                           head_dim=128, tie_word_embeddings=True)),
    "135M": ("llama", dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
                           tie_word_embeddings=True)),
    "window": ("gemma3_text", GEMMA | dict(sliding_window=512)),
    "softcap": ("gemma2", GEMMA | dict(sliding_window=100, attn_implementation="eager")),
    "sinks": ("gpt_oss", dict(hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
                              head_dim=64, num_local_experts=8, num_experts_per_tok=4, layer_types=[WINDOW, FULL],
                              sliding_window=128, rope_parameters=ROPE)),
    "latent": ("deepseek_v3", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16,
                                   num_key_value_heads=16, q_lora_rank=768, kv_lora_rank=512, qk_rope_head_dim=64,
                                   qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=1, n_routed_experts=16,
                                   n_group=4, topk_group=2, num_experts_per_tok=4, moe_intermediate_size=768)),
    "experts": ("mixtral", dict(hidden_size=2048, intermediate_size=4096, num_attention_heads=16,
                                num_key_value_heads=8, num_local_experts=8)),
}  # fmt: skip
"""Name -> type of model, sizes."""
SYSTEMS = [
    *((name, tiny, {}) for name, tiny in zip(WIDTHS, (
        "llama", None, "qwen3", None, "gemma3", "gemma2", "gpt_oss", "deepseek_v3", "mixtral"))),
    ("8B", None, dict(kv_cache_dtype="fp8")),
    ("1B", "llama", dict(kv_cache_dtype="fp8_per_token_head")),
]  # fmt: skip
"""A name of `WIDTHS`, the tiny model in its place on a CPU (None: it has been there), and options."""
CASES = [
    pytest.param(width, tiny, options, id=" ".join((width, *options.values())), marks=ON_GPU if GPU or not tiny else [])
    for width, tiny, options in SYSTEMS
]


def build(width):
    """A model of published width in bfloat16 on a GPU, with random weights."""
    kind, sizes = WIDTHS[width]
    more = dict(num_hidden_layers=2, vocab_size=32000, max_position_embeddings=8192) | models.SPECIAL
    sizes = dict(sizes)
    attention = sizes.pop("attn_implementation", None)
    config = AutoConfig.for_model(kind, **sizes | more)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()


@functools.lru_cache(1)
def graph_of(width, tiny, options):
    """What verifies trees."""
    gc.collect()
    model = build(width) if GPU else models.ADMITTED[tiny]()
    exact = dict(exact="bits") if GPU else {}
    return spec_compile.speculate(model, compile=False, **exact, **dict(options)).speculation.engine.runtime.verify


class Trees:
    """Rows of random tokens behind which trees are verified; `lengths`: tokens committed in each."""

    def __init__(self, graph, lengths, nodes):
        self.graph, self.lengths = graph, torch.tensor(lengths, device=graph.device)
        longest = max(lengths)
        self.slots = -(-(longest + nodes) // ROUNDED) * ROUNDED
        self.cache = Cache(graph, len(lengths), self.slots).argument
        tokens = torch.randint(graph.vocab_size, (len(lengths), longest + nodes)).to(graph.device)
        self.tree = tokens[:, longest:]
        # Behind the end of a shorter row, the prompt's tokens lie where the tree will.
        prompt, steps = tokens[:, :longest], torch.arange(longest, device=graph.device).expand(len(lengths), -1)
        self.run(prompt, steps, torch.zeros_like(self.lengths), None)

    def run(self, tokens, positions, lengths, ancestors):
        if GPU:
            torch.cuda.synchronize()  # kernels read what no kernel of the graph computes before that may be done
        return self.graph.gm(tokens, positions, lengths, ancestors, self.cache, self.slots)[0]

    def verify(self, parents):
        """Logits [B, N, V] of the nodes of one tree in each row; parents [B, N]."""
        ancestors, depth = ancestry(parents.to(self.lengths.device))
        return self.run(self.tree, self.lengths[:, None] + depth, self.lengths, ancestors)

    def step(self, nodes, depths):
        """Logits [B, V] of a plain step, which commits the token of nodes [B] behind `depths` [B] others."""
        at = self.lengths + torch.tensor(depths, device=self.lengths.device)
        tokens = self.tree.gather(1, torch.tensor(nodes, device=at.device)[:, None])
        return self.run(tokens, at[:, None], at, torch.ones_like(tokens))[:, 0]


def paths(parents):
    """Nodes from the root to each leaf."""

    def up(node):
        return [*up(parents[node]), node] if node >= 0 else []

    return [up(node) for node in range(len(parents)) if node not in parents]


@pytest.mark.sweep(3)
@torch.no_grad()
@pytest.mark.parametrize("width, tiny, options", CASES)
@pytest.mark.parametrize("batch", [1, 3] if GPU else [3])
@pytest.mark.parametrize("nodes", [2, 5, 16, 64] if GPU else [6])
def test_nodes_and_plain_steps(width, tiny, options, batch, nodes):
    rng = random.Random(f"{width} {options} {batch} {nodes}")
    lengths = [max(rng.choice(EDGES[: None if GPU else 4]) - rng.choice((0, nodes // 2)), 1) for _ in range(batch)]
    trees = Trees(graph_of(width, tiny, tuple(options.items())), lengths, nodes)
    parents = [[-1, *(rng.randrange(node) for node in range(1, nodes))] for _ in lengths]
    in_tree = trees.verify(torch.tensor(parents))
    every = [paths(row) for row in parents]
    for number in range(max(map(len, every))):
        walked = [row[number % len(row)] for row in every]
        for depth in range(max(map(len, walked))):
            depths = [min(depth, len(path) - 1) for path in walked]  # a shorter path repeats its last step
            chosen = [path[at] for path, at in zip(walked, depths)]
            alone = trees.step(chosen, depths)
            for row, node in enumerate(chosen):
                if GPU:
                    assert torch.equal(in_tree[row, node], alone[row]), (lengths, parents, row, node)
                else:
                    torch.testing.assert_close(in_tree[row, node], alone[row], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("width, compile", [*((width, False) for width in WIDTHS), ("135M", True), ("0.6B", True)])
def test_answers_of_captured_rounds(width, compile):
    """Tokens and logits of answers, with drafts that are mostly right."""
    model = build(width)
    plain, logits, _ = bits_of_answers(model, 1, exact="bits", compile=compile)
    for nodes in (4, 64):
        tokens, same, accepted = bits_of_answers(model, nodes, plain, exact="bits", compile=compile)
        assert torch.equal(tokens, plain) and torch.equal(same, logits)
        assert accepted > 1.5


LENGTHS = (70, 300, 1026) if GPU else (5, 20, 41)
"""Tokens of prompts: after the first, the third and the last chunk of attention's keys, in spans of two sizes."""
CAPACITY = 2048 if GPU else 256
CHUNKS = [(4096,), (32,), (7, 64, 128, 33)]
"""Sizes of the chunks of a prompt, which are repeated: all at once, few, several."""
ON_CPU = [case for case in CASES if GPU or not case.values[2]]
"""An fp8 cache in float32 rounds nearly equal keys to other numbers."""


@functools.lru_cache(1)
def requests_of(width, tiny, options, **more):
    """A system that promises the bits of requests; on a CPU sums are only nearly equal."""
    gc.collect()
    model = build(width) if GPU else models.ADMITTED[tiny]()
    exact = dict(exact="request", cuda_graphs=False) if GPU else dict(check=False)
    return spec_compile.speculate(model, compile=False, **exact, **dict(options), **more)


def prompts_of(runtime, lengths=LENGTHS):
    return [torch.randint(3, runtime.verify.vocab_size, (length,)).tolist() for length in lengths]


def begun(runtime, prompts):
    """A session of prompts of which nothing has been processed."""
    session, rows = Session(runtime, len(prompts), CAPACITY), len(prompts)
    begin_rows(session.state, prompts, [CAPACITY] * rows)
    return session


def go_on(session, missing, sizes, done=0):
    """Process `missing` tokens of the longest prompt, after `done` ones, in chunks of `sizes`."""
    for size in itertools.cycle(sizes):
        if missing <= 0:
            return session
        size = min(size, max(missing, 2))
        session.prefill(size, session.max_kv_len(done + size))
        done, missing = done + size, missing - size


def processed(runtime, prompts, sizes=CHUNKS[0]):
    return go_on(begun(runtime, prompts), max(map(len, prompts)) - 1, sizes)


def look(session):
    """Logits [B, V] of a round without drafts."""
    session.state.root()
    if GPU:
        torch.cuda.synchronize()  # see `Trees.run`
    slots = session.max_kv_len(int(session.state.lengths.max()) + 1)
    return session.get(StepKind.LOOK, 1)(slots)[0][:, 0]


def by_rounds(runtime, prompts):
    """A session whose prompts went through rounds, one token after the other."""
    session = begun(runtime, prompts)
    state = session.state
    for _ in range(max(map(len, prompts)) - 1):
        look(session)
        gained = (state.lengths + 1 < state.prompt_lengths).long()
        state.kv.states.commit(torch.zeros_like(gained)[:, None], gained)
        state.lengths.add_(gained)
    return session


def facts(session):
    """For each row the logits after its prompt, and its keys and values."""
    state, logits = session.state, look(session)
    texts = zip(state.lengths.tolist(), state.kv.table.long())
    slots = [[part[pages].transpose(0, 1).flatten(1, 2)[:, :end] for part in state.kv.tensors] for end, pages in texts]
    return [[logits[row], *parts] for row, parts in enumerate(slots)]


def assert_same(ours, theirs):
    """The same bits, or on a CPU nearly equal numbers."""
    for one, other in zip(ours, theirs, strict=True):
        if GPU:
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep("8B")
@torch.no_grad()
@pytest.mark.parametrize("width, tiny, options", ON_CPU)
def test_chunks_of_prompts(width, tiny, options):
    runtime = requests_of(width, tiny, tuple(options.items())).speculation.engine.runtime
    prompts = prompts_of(runtime)
    expected = facts(by_rounds(runtime, prompts))
    for sizes in CHUNKS:
        for ours, theirs in zip(facts(processed(runtime, prompts, sizes)), expected, strict=True):
            assert_same(ours, theirs)


@pytest.mark.sweep("8B")
@torch.no_grad()
@pytest.mark.parametrize("width, tiny, options", ON_CPU)
def test_neighbours_of_prompts(width, tiny, options):
    runtime = requests_of(width, tiny, tuple(options.items())).speculation.engine.runtime
    prompts = prompts_of(runtime)
    for rows in (prompts, prompts[::-1], [prompt for prompt in prompts for _ in range(5)]):
        for prompt, together in zip(rows, facts(processed(runtime, rows, CHUNKS[2]))):
            assert_same(together, facts(processed(runtime, [prompt]))[0])


@pytest.mark.sweep("8B")
@torch.no_grad()
@pytest.mark.parametrize("width, tiny, options", ON_CPU)
def test_known_beginnings_of_prompts(width, tiny, options):
    """A prompt that goes on from the first tokens of another row, which were processed with other tokens after them."""
    runtime = requests_of(width, tiny, tuple(options.items())).speculation.engine.runtime
    longest, other = (prompts_of(runtime, LENGTHS[-1:])[0] for _ in range(2))
    expected = facts(processed(runtime, [longest]))[0]
    for known in (1, LENGTHS[0] // 2, LENGTHS[0]):
        text = longest[:known] + other[known:]
        count = pages_of(CAPACITY)
        lanes = Session(runtime, 1, CAPACITY, pool=1 + 2 * count)
        to = Session(runtime, 1, CAPACITY, pool=lanes)
        own, other_own = [*range(1, count + 1)], [*range(count + 1, 2 * count + 1)]
        shared = own[: known // PAGE]  # and the page that the known tokens end in is copied
        for session, pages in ((lanes, own), (to, shared + other_own[len(shared) :])):
            session.state.set_pages([(0, number, page) for number, page in enumerate(pages)])
        lanes.state.enter(0, text, [], max_lengths=CAPACITY, lengths=0)
        go_on(lanes, len(text) - 1, CHUNKS[1])
        for cache in lanes.caches:
            for tensor in cache.tensors:
                tensor[other_own[len(shared)]] = tensor[own[len(shared)]]
        to.state.enter(0, longest, [], max_lengths=CAPACITY, lengths=known)
        assert_same(facts(go_on(to, len(longest) - 1 - known, CHUNKS[2], known))[0], expected)


@pytest.mark.sweep("8B")
@torch.no_grad()
@pytest.mark.parametrize("width, tiny, options", ON_CPU)
def test_evicted_beginnings_of_prompts(width, tiny, options):
    """A text loses its row, and comes back from host memory for a prompt that goes on from its answer.

    Log-probabilities of a prompt have all of it processed again, so that they tell the answer without reuse.
    """
    more = dict(prefix_cache_host_bytes=1 << 30, max_cache_len=CAPACITY * 2)
    fast = requests_of(width, tiny, tuple(options.items()), **more)
    text, other = prompts_of(fast.speculation.engine.runtime, (290, 310))
    settings = dict(max_new_tokens=8, eos_token_id=-1, logprobs=0)
    with managed(fast) as manager:

        def answer(prompt, **options):
            name = manager.add_request(prompt, **settings, **options)
            return collect(manager, 1)[name]

        first = answer(text)
        answer(other)
        prompt = text + first.generated_tokens + other[:20]
        again = answer(prompt)
        answer(other)
        whole = answer(prompt, prompt_logprobs=0)
    assert again.speculation.reused_prompt_tokens >= 256 and whole.speculation.reused_prompt_tokens == 0
    assert again.generated_tokens == whole.generated_tokens
    assert_same([torch.tensor(again.logprobs)], [torch.tensor(whole.logprobs)])
