"""Scripts that launch the kernels of each family at the sizes of real models; `compiled` runs them in its process.

There ``compiled(module, *names)`` lets kernels be compiled where they would be launched, `found` collects them in a
case, `results` has them by the case's name, CARD has the GPU's facts, and HALF is the dtype of 16 bits in which the GPU
computes.
"""

ATTENTION = """
from spec_compile.kernels.attention import tree_attention
from spec_compile.kernels.attention.base import AttentionCall
from spec_compile.kernels.attention.tail_tiles import nodes_per_tile, tail_tiles
from spec_compile.kernels.card import FP8

compiled(tree_attention, "append_kernel", "prompt_kernel", "tree_kernel", "merge_spans_kernel")
SIZES = (32, 8, 64, 64), (32, 8, 128, 128), (8, 1, 256, 256), (4, 4, 24, 16), (4, 2, 8, 8)
for heads, kv_heads, size, values in SIZES:
    for nodes, causal in ((1, False), (16, False), (64, False), (2048, True)):
        tables = torch.ones(heads, 129, dtype=HALF), torch.ones(1, nodes, heads, 129, dtype=HALF)
        biased = [(False, None, slopes) for slopes in (torch.ones(heads), *tables)]
        for turned, window, slopes in ((True, None, None), (False, 512, None), *biased):
            heads_of = heads, kv_heads, kv_heads
            shapes = zip(heads_of, (size, size, values))
            q, k, v = (torch.zeros(1, nodes, n, d, dtype=HALF).transpose(1, 2) for n, d in shapes)
            caches = [torch.zeros(1, kv_heads, 4096, d, dtype=HALF) for d in (size, values)]
            lengths, places = torch.tensor([1024]), torch.arange(nodes)[None]
            turning = [None] * 4
            if turned:
                turning = [*torch.zeros(2, 1, nodes, size, dtype=HALF), *torch.ones(2, size).to(HALF)]
            found = []
            inputs = q, k, v, *caches, lengths, None if causal else places, places
            call = AttentionCall(*inputs, None, 0.1, None, window, None, *turning, 1e-6)
            tiles = None if causal else tail_tiles(places, nodes_per_tile(heads // kv_heads))
            tree_attention.launch(call._replace(tiles=tiles, slopes=slopes))
            table = torch.zeros(1, 4096 // 64, dtype=torch.int32)
            pools = [cache.view(-1, kv_heads, 64, cache.shape[3]) for cache in caches]
            paged = call._replace(key_cache=pools[0], value_cache=pools[1], table=table)
            tree_attention.launch(paged._replace(tiles=tiles, slopes=slopes))
            if turned and CARD.capability >= FP8:
                keys, scales = [cache.to(torch.float8_e4m3fn) for cache in caches], torch.zeros(1, kv_heads, 4096, 2)
                call = call._replace(key_cache=keys[0], value_cache=keys[1], scales=scales)
                tree_attention.launch(call._replace(tiles=tiles))
                keys, scales = [pool.to(torch.float8_e4m3fn) for pool in pools], torch.zeros(64, kv_heads, 64, 2)
                paged = paged._replace(key_cache=keys[0], value_cache=keys[1], scales=scales)
                tree_attention.launch(paged._replace(tiles=tiles))
            named = f"turned {turned}, window {window}, slopes {None if slopes is None else slopes.dim()}"
            results[f"{nodes} nodes, heads of {size}, {named}"] = found
"""

INDEXED = """
from spec_compile.contrib.indexed import attention as indexed_attention
from spec_compile.kernels.attention.base import AttentionCall

compiled(indexed_attention, "scores_kernel", "chosen_kernel", "merge_kernel")
for heads, size, values, index_heads, is_half in ((128, 192, 128, 64, True), (4, 24, 16, 5, False)):
    found, dtype = [], HALF if is_half else torch.float32
    for nodes in (1, 16):
        q = torch.zeros(1, heads, nodes, size, dtype=dtype)
        index_q = torch.zeros(1, nodes, index_heads, 128, dtype=dtype)
        caches = [torch.zeros(1, heads, 4096, each, dtype=dtype) for each in (size, values)]
        visible, keys = torch.ones(1, nodes, 4096, dtype=torch.bool), torch.zeros(1, 1, 4096, 128, dtype=dtype)
        indexed_attention.scores(index_q, keys, torch.zeros(1, nodes, index_heads), visible)
        chosen, places = torch.zeros(1, nodes, 2048, dtype=torch.int32), torch.arange(nodes)[None]
        inputs = q, None, None, *caches, torch.tensor([9]), None, places, None, 0.1, None, None
        indexed_attention.launch(AttentionCall(*inputs, chosen=chosen), q)
    results[f"indexed attention, {heads} heads of {size}"] = found
"""

LARGE_TILES = """
from spec_compile.kernels.attention import tree_attention

tree_attention.MANY = 1
""" + ATTENTION.replace("(1, False), (16, False), (64, False), (2048, True)", "(64, False),").replace("4096", "32768")
"""Trees over long caches, of so many rows that a program takes all spans."""


PRODUCTS = """
from spec_compile.kernels.linear import plans, skinny_gemm
from spec_compile.kernels.linear.product import Product, QkvHeads

compiled(skinny_gemm, "skinny_gemm_kernel")
for heads, kv_heads, size, inputs, norms in ((16, 8, 128, 1024, True),):
    weight = torch.zeros((heads + 2 * kv_heads) * size, inputs, dtype=HALF)
    how = plans.plan(*weight.shape, processors=CARD.processors, memory=CARD.memory)
    for rows in (1, 300):
        x, out, angle = (torch.zeros(rows, n, dtype=HALF) for n in (inputs, heads * size, size))
        cache, norm = torch.zeros(1, kv_heads, 4096, size, dtype=HALF), angle[0] if norms else None
        ends = QkvHeads(angle[None], angle[None], norm, norm, 1e-6, None, cache, cache, torch.tensor([1024]))
        found, tile = [], plans.appending(how.tile(rows), size if norms else 0, CARD.memory)
        skinny_gemm.launch(Product(x, weight, after=ends), out, how.parts, tile)
        results[f"{rows} rows, {heads} heads of {size}, norms {norms}"] = found
"""

OTHER_PRODUCTS = PRODUCTS.replace("(16, 8, 128, 1024, True)", "(32, 8, 64, 2048, False), (9, 3, 64, 576, True)")

TRAINING = """
from spec_compile.train import attention_kernels, distil_kernel

compiled(distil_kernel, "_distil", "_confidence")
found, logits, shared = [], torch.zeros(4, 151936, dtype=HALF), torch.zeros(4, dtype=torch.int64)
for mix in ((1.0, 0.0), (0.1, 0.9)):
    distil_kernel.launch(logits, logits[:2], shared, torch.zeros(4), *mix)
distil_kernel.confidence(logits, shared)
results["a loss"] = found

compiled(attention_kernels, "_join", "_join_backward", "_attend_blocks")
compiled(attention_kernels, "_backward_queries", "_backward_keys")
for size in (64, 80, 128, 256):
    found, q = [], torch.zeros(1, 5, 4, size, dtype=HALF).transpose(1, 2)
    (keys, values), total = torch.zeros(2, 6, 1, 5, 4, size, dtype=HALF), torch.zeros(1, 4, 5)
    attention_kernels.join(q, keys, values, q, total, 0.1)
    attention_kernels.join_backward(q, q, keys, values, q, total, q, 0.1)
    results[f"a rollout with heads of {size}"] = found

for size in (128, 256):
    found, heads = [], torch.zeros(2, 5, 48, size, dtype=HALF)
    inputs = heads.new_zeros(2, 10, 48, size), heads, heads, heads[:, :, :40], heads[:, :, :40]
    anchors, total = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 10, 48)
    attention_kernels.forward_blocks(*inputs, anchors, 16, 0.1, True)
    attention_kernels.backward_blocks(inputs[0], *inputs, anchors, 16, 0.1, True, inputs[0], total)
    results[f"blocks with heads of {size}"] = found
"""

QUANTISED = """
from spec_compile import quantised
from spec_compile.kernels.linear import plans, quantised_kernel, skinny_gemm
from spec_compile.kernels.linear.product import Gate, Normed, Product


compiled(skinny_gemm, "skinny_gemm_kernel", PTX=True)
compiled(skinny_gemm, "round_rows_kernel")
compiled(quantised_kernel, "round_blocks_kernel")
KINDS = {
    "Fp8Block 128 128": ("float8_e4m3fn", 1), "PerChannel": ("float8_e4m3fn", 64), "Int8Weight": ("int8", 1),
    "Nibbles 64 1 0": ("int32", 64), "Nibbles 128 0 1": ("int32", 16), f"TableNibbles 64 {1 << 500}": ("int32", 16),
    "RoundedNibbles 128 0": ("int32", 16), "RoundedNibbles 32 1": ("int32", 64),
}
for kind, (dtype, rows) in KINDS.items():
    layout, (outputs, inputs) = quantised.layout_of(kind), (14336 if kind.startswith("Fp8Block") else 28672, 4096)
    if layout.bits == 4 and rows == 64:
        outputs, inputs = 4096, 14336  # whose parts are multiplied in turn
    half = torch.float16 if kind == "Nibbles 64 1 0" else HALF
    weight = torch.empty(outputs, inputs // (8 if layout.bits == 4 else 1), dtype=getattr(torch, dtype))
    x, out = torch.empty(rows, inputs, dtype=half), torch.empty(rows, outputs // 2, dtype=half)
    scales = torch.empty(1, dtype=torch.int32 if kind.startswith("Nibbles") else torch.float32)
    found, how = [], plans.packed_plan(outputs, inputs, layout.bits, processors=CARD.processors, memory=CARD.memory)
    product = Product(x, weight, None, scales, kind, Normed(torch.empty(rows, 64), 1e-5), Gate())
    skinny_gemm.launch(product, out, how.parts, how.tile(rows))
    if CARD.capability == (9, 0):
        assert how.tile(rows).unroll == (2 if kind == "Fp8Block 128 128" else 1)
        assert how.tile(rows).turns == (2 if inputs == 14336 else 1)
    results[f"{kind}, {rows} rows"] = found
    # The weights go to Hopper's tensor cores as they are, or from the registers in which they are decoded.
    *_, kernel = found
    if CARD.capability != (9, 0):
        continue
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert dtype == "float8_e4m3fn" or "dot_op<{opIdx = 0" in kernel.asm["ttgir"]
    assert "ttg.local_alloc %" not in kernel.asm["ttgir"] or how.tile(rows).unroll > 1  # whose last step may be half
    # A multiprocessor has 65,536 registers, for four programs of 128 threads.
    assert (".maxnreg 128" in kernel.asm["ptx"]) == (kind == "PerChannel")
"""

EXPERTS = """
from spec_compile.kernels.experts import launch, plans, wide_kernel
from spec_compile.kernels.linear import quantised_kernel
from spec_compile.kernels.linear.product_ops import stream_after
from spec_compile.quantised.experts import ExpertFormat


compiled(launch, "experts_kernel", "wide_experts_kernel", PTX=True)
compiled(launch, "combine_kernel")
compiled(quantised_kernel, "round_blocks_kernel")
compiled(wide_kernel, "sort_kernel")
SHAPES = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, {}),
    "the same in FP8": (128, 8, 2048, 768, dict(block=128)),
    "Mixtral": (8, 2, 4096, 14336, {}),
    "gpt-oss": (32, 4, 2880, 2880, dict(transposed=True, biased=True)),
    "gpt-oss in MXFP4": (32, 4, 2880, 2880, dict(mxfp4=2880, biased=True)),
    "the same on two GPUs": (16, 4, 2880, 2880, dict(mxfp4=2880, biased=True, first=16, of=32)),
}
if CARD.lacks_tensor_cores:  # quantised experts are refused
    SHAPES = {name: shape for name, shape in SHAPES.items() if not shape[-1].keys() & {"block", "mxfp4"}}
for name, (count, top, size, inner, layout) in SHAPES.items():
    clamped = dict(gate="clamped", interleaved=True, alpha=1.7, limit=7.0)
    gate = clamped if layout.get("biased") else dict(gate="silu")
    first, second = ExpertFormat(**gate, **layout), ExpertFormat(**layout)

    def parts(outputs, inputs):
        sizes = (inputs, outputs) if second.transposed else (outputs, inputs)
        dtype = torch.float8_e4m3fn if second.block else HALF
        scales = [torch.empty(count, outputs // 128, inputs // 128, device="meta")] if second.block else []
        bias = [torch.empty(count, outputs, dtype=HALF, device="meta")] if second.biased else []
        if second.mxfp4:
            shapes = (count, outputs, 32 * 12), (count, 2 * 12, outputs)
            return [*(torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes), *bias]
        return [torch.empty(count, *sizes, dtype=dtype, device="meta"), *scales, *bias]

    for tokens in (1, 31, 2048):
        found, ids = [], torch.zeros(tokens, top, dtype=torch.int64)
        x = torch.zeros(tokens, size, dtype=HALF)
        inside = launch.up(x, ids, parts(2 * inner, size), first)
        for stream in (None, stream_after(x, x[0], 0.0)):
            launch.down(inside, ids, torch.zeros(tokens, top), parts(size, inner), second, stream=stream)
        products = [each for each in found if each.metadata.name.endswith("experts_kernel")]
        least = plans.LEAST_MXFP4_PAIRS if second.mxfp4 else plans.LEAST_PAIRS
        form = "wide_experts_kernel" if tokens * top >= least else "experts_kernel"
        assert {each.metadata.name for each in products} == {form}
        by_tile = tokens == 2048 and second == ExpertFormat()
        for kernel in products if CARD.capability == (9, 0) else ():
            assert "wgmma" in kernel.asm["ptx"] and "cp.async" in kernel.asm["ptx"], name
            assert not by_tile or "cp.async.bulk.tensor" in kernel.asm["ptx"], name
            assert not second.mxfp4 or "dot_op<{opIdx = 0" in kernel.asm["ttgir"]
            assert not second.mxfp4 or "ttg.local_alloc %" not in kernel.asm["ttgir"]
        results[f"{tokens} tokens, {name}"] = found
"""

ALL_REDUCE = """
from spec_compile.kernels import all_reduce
from spec_compile.kernels import all_reduce_kernel as launch
from spec_compile.kernels.all_reduce import make_exchange


compiled(launch, "all_reduce_kernel", ON_GPU=True)
launch._processors = lambda device: CARD.processors
for ranks in (2, 4):
    slots = torch.empty(2, ranks + 1, 1 << 20, dtype=torch.int32)
    exchange = make_exchange(slots, 1, [slots.data_ptr()] * ranks)
    for rows, size, shots in ((1, 4096, 1), (16, 4096, 2), (64, 8192, 2), (3, 4090, 1), (3, 4090, 2)):
        found, all_reduce.HOP_BYTES = [], 1e9 if shots == 1 else 0
        part, out = torch.zeros(rows, size), torch.zeros(rows, size, dtype=HALF)
        stream = out, out[0], 0.0, out, torch.zeros(rows, -(-size // 64))
        launch.launch(exchange, part, out, stream, 64)
        launch.launch(exchange, out, out)
        for kernel in found:
            assert "ld.volatile.global" in kernel.asm["ptx"] and "trap" in kernel.asm["ptx"]
        name = f"{ranks} ranks, {rows} rows of {size}, {shots} shots"
        results[name] = found
"""

RECURRENCES = """
from spec_compile.kernels.recurrence import initial_state, launch, stash_shapes, walk

found = []
compiled(walk, "walk_kernel")
walk.launch(torch.ones(1, 64, dtype=torch.int64))
results["a walk"] = found
for name in ("linear", "convolution", "selective", "channelwise"):
    compiled(launch, "linear_attention_kernel" if name == "linear" else f"{name}_kernel", f"{name}_commit_kernel")


def linear(key_heads, heads, dk, dv, *channels):
    q, v, g = (torch.zeros(1, 16, *each) for each in ((key_heads, dk), (heads, dv), (heads, *channels)))
    return [q, q, v, g]


SHAPES = {
    "Qwen3-Next": ("delta", [*linear(16, 32, 128, 128), torch.zeros(1, 16, 32)]),
    "Kimi-Linear": ("delta", [*linear(32, 32, 128, 128, 128), torch.zeros(1, 16, 32)]),
    "Falcon-H1-7B": ("decay", linear(1, 24, 256, 128)),
    "LFM2": ("convolution", [torch.zeros(size).to(HALF) for size in ((1, 16, 2048), (2048, 3))]),
    "Jamba": ("selective", [torch.zeros(size) for size in (*[(1, 16, 16)] * 2, *[(1, 16, 8192)] * 2, (8192, 16))]),
    "RecurrentGemma-9B": ("gated", [torch.zeros(1, 16, 4096)] * 2),
    "RWKV-4-14B": ("wkv", [torch.zeros(size) for size in (*[(1, 16, 5120)] * 2, *[(5120,)] * 2)]),
}
for name, (kind, inputs) in SHAPES.items():
    state, found = initial_state(kind, inputs, 1), []
    parts = stash_shapes(kind, inputs)
    stash = [torch.zeros(*(() if shared else (1,)), *shape, dtype=dtype) for shape, dtype, shared in parts]
    launch.run(kind, inputs, state, stash, torch.zeros(1, 5, 16, dtype=torch.int32), None)
    launch.commit(kind, [state], stash, torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    launch.run(kind, inputs, state, None, None, torch.tensor([16]))
    # A tree and a chunk multiply and add by the same instructions, so that both round alike.
    tree, *_, chunk = [sorted(re.findall(r"(?:fma|mul|add|sub)[.a-z]*[.]f32", each.asm["ptx"])) for each in found]
    assert tree == chunk, name
    # A tile lies in the registers alike in a tree, in a commit and in a chunk, so that all round alike.
    text = "".join(kernel.asm["ttgir"] for kernel in found)
    layouts = {layout for layout in re.findall("#ttg.blocked<(.*)>", text) if layout.endswith("order = [1, 0]}")}
    assert kind in ("convolution", "gated", "wkv") or len(layouts) == 1, (name, layouts)
    results[name] = found
"""

NORMS = """
from spec_compile.kernels import norms, row_scan
from spec_compile.kernels.linear import float32

compiled(norms, "gated_rms_norm_kernel", "l2_norms_kernel", "_add_rms_norm", "_rms_norm_of_heads")
compiled(row_scan, "_sum_parts")
compiled(float32, "linear_kernel")
for heads, size, inputs, experts in ((32, 128, 2048, 512),):
    for rows in (1, 16):
        found = []
        x, gate = torch.zeros(2, 1, rows, heads * size, dtype=HALF)
        for gate_first in (False, True):
            weight = x[0, 0]
            norms.launch_gated_norm(x.float(), gate, weight, 1e-6, size, "silu", gate_first, not gate_first)
        q = x.unflatten(-1, (heads, size))
        norms.launch_l2_norm(q, q, 1e-6, 0.1)
        norms.launch_norm(q, None, weight[:size], 1e-6, None)
        row_scan.launch_sum(x[..., :8])
        for dtype in (HALF, torch.float32):
            float32.launch(torch.zeros(rows, inputs, dtype=HALF), torch.zeros(experts, inputs, dtype=dtype))
        layouts = [sorted(re.findall("#ttg.blocked<(.*?)>", kernel.asm["ttgir"])) for kernel in found]
        same = results.setdefault(f"{heads} heads of {size}", layouts)
        assert same == layouts, "rows change how a sum lies in the registers"
        results[f"{rows} rows, {heads} heads of {size}"] = found
    del results[f"{heads} heads of {size}"]
"""

DRAFTS = """
from spec_compile.drafters.trees.merge import KEPT, LAYOUT
from spec_compile.kernels import copies, top_logits, trees
from spec_compile.kernels.linear import low_rank_kernel

compiled(trees, "lattice_kernel", "unroll_kernel", "merge_kernel", "learn_kernel")
compiled(copies, "_pack_pages", "_compact")
compiled(copies, "_publish", RELEASE=True)
compiled(top_logits, "_top_logits")
compiled(low_rank_kernel, "low_rank_kernel")
found = results["a lattice"] = []
trees.launch(torch.zeros(2).long(), torch.zeros(2, 15, 16).long(), torch.zeros(2, 15, 16, 16), 64)
found = results["recycled tokens"] = []
table = torch.zeros(49152, 16).int()
for rows, nodes in ((1, 16), (8, 64)):
    trees.launch_unroll(table, torch.zeros(rows).long(), torch.ones(rows).bool(), nodes, 6)
    trees.launch_renew(table, torch.zeros(rows * nodes).long(), torch.zeros(rows * nodes, 49152, dtype=HALF))
for size in (16, 64):
    found = results[f"two trees of {size} nodes"] = []
    both, row, counts = torch.zeros(2, 3 * size).long(), torch.zeros(2).long(), torch.zeros(2, LAYOUT["CELLS"])
    tree, drafts = [both[:, :size], both[:, :size], row], [both] * 5 + [both.float()]
    trees.launch_merge(row, tree, both[:, :size].float(), tree, row, counts, row, drafts, size, **LAYOUT)
    trees.launch_learn(counts, drafts, row, row, row, both, size, KEPT)
found = results["copies of pages"] = []
numbers = torch.zeros(2, 8, dtype=torch.int64)
pools = [torch.zeros(2, 3, 64, 64).short() for _ in range(2)]
for to_pages in (False, True):
    copies.launch_pack(pools, torch.zeros(2, 24576).short(), numbers[:, 0], to_pages)
found = results["ends of a round"] = []
ends = [torch.zeros(2, 3, 128, 64).to(HALF) for _ in range(2)], numbers[:, 0], numbers, numbers[:, 0]
copies.launch(*ends)
copies.launch(*ends, numbers.int())
copies.publish(numbers, torch.zeros(3, 17, dtype=torch.int64), numbers[0, :1])
top_logits.launch(torch.zeros(16, 151936, dtype=HALF), 10, 1.0)
top_logits.launch_likeliest(torch.zeros(2, 8, 151936, dtype=HALF), torch.zeros(2, 151936).bool(), numbers > 0)
x, down = torch.zeros(2, 16, 64, dtype=HALF), torch.zeros(3, 8, 64, dtype=HALF)
low_rank_kernel.launch(x, x, down, down.mT.contiguous(), torch.zeros(3), numbers[:, 0])
"""


SCRIPTS = {
    "attention": ATTENTION,
    "products": PRODUCTS,
    "other products": OTHER_PRODUCTS,
    "training": TRAINING,
    "quantised": QUANTISED,
    "experts": EXPERTS,
    "indexed": INDEXED,
    "all_reduce": ALL_REDUCE,
    "recurrences": RECURRENCES,
    "norms": NORMS,
    "drafts": DRAFTS,
    "large tiles": LARGE_TILES,
}

WITHOUT = {75: {"products", "other products", "quantised", "training"}}
"""By compute capability: families that libraries compute there, or that are refused by name."""
