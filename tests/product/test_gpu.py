"""On a GPU: captured rounds give the tokens that the model gives on the CPU, wait for nothing, and leak nothing."""

import copy
import functools
import os

import draft_rounds as drafts
import models
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import LogitsProcessor

from spec_compile import NgramTrie, UnsupportedModelError, speculate
from spec_compile.drafters.modules.dflash import DFlashDraft
from spec_compile.drafters.modules.eagle import Eagle3Head
from spec_compile.drafters.modules.layers import LatentSizes, LayerKnobs
from spec_compile.kernels.experts import launch
from spec_compile.runtime.pipeline import AHEAD
from spec_compile.tools.audit import audit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW = 40
MODES = {
    "graphs": dict(),
    "compiled": dict(cuda_graphs=False),
    "eager": dict(cuda_graphs=False, compile=False),
    "eager graphs": dict(compile=False),
}


@functools.cache
def model(name="llama", device="cuda"):
    return models.ADMITTED[name]().to(device)


@functools.cache
def fast(name="llama", mode="graphs"):
    return speculate(model(name), adaptive=False, max_cache_len=700, **MODES[mode])


def random_ids(length, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randint(3, models.VOCAB, (batch, max(4, length // 3)), generator=generator)
    return pattern.repeat(1, 4)[:, :length]  # repeats, so that something is drafted


@functools.cache
def plain(name, length, batch, seed=0, new=NEW):
    ids = random_ids(length, batch, seed)
    return model(name, "cpu").generate(ids, do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0)


def generated(system, ids, new=NEW, **options):
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return system.generate(ids.cuda(), max_new_tokens=new, **options).cpu()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 5])  # of 8 rows that a program takes, three are not there
def test_tokens_are_the_cpus(mode, batch):
    system = fast("llama", mode)
    for seed, length in enumerate((5, 200, 17, 64, 33)):  # also after a longer prompt
        assert torch.equal(generated(system, random_ids(length, batch, seed)), plain("llama", length, batch, seed))
    assert system.speculation.stats.accept_length > 1


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma3", "gemma2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_architectures(name):
    system = speculate(model(name), max_cache_len=512, compile=name in ("qwen3", "gemma3"))
    for batch in (1, 3):
        assert torch.equal(generated(system, random_ids(50, batch)), plain(name, 50, batch))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_mixture_has_the_same_bits_whatever_is_drafted(name):
    target = models.ADMITTED[name]().to("cuda", torch.bfloat16)
    system = speculate(target, max_cache_len=512, compile=False, exact="bits")
    drafted = generated(system, random_ids(50))
    system.speculation.engine.most_nodes = 1
    assert torch.equal(generated(system, random_ids(50)), drafted)


@pytest.mark.parametrize("mode", ["graphs", "eager graphs"])
@pytest.mark.parametrize("name", models.INDEXED)
def test_indexed_attention(name, mode):
    """Texts of fewer tokens than are chosen, and of more; prompts as short as a tree, and longer ones."""
    target = models.INDEXED[name]()
    system = speculate(copy.deepcopy(target).to("cuda"), adaptive=False, max_cache_len=512, **MODES[mode])
    for length, batch in ((5, 1), (50, 3), (200, 1)):
        ids = random_ids(length, batch)
        wanted = target.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
        assert torch.equal(generated(system, ids), wanted)
    assert system.speculation.stats.accept_length > 1


@functools.cache
def drafts_target(name):
    return copy.deepcopy(drafts.target(name)).to("cuda")


def draft_for(target, algorithm, name="llama", **options):
    """Options with a draft on the GPU that shares the target's matrices; none for n-grams."""
    if algorithm == "ngram":
        return {}
    draft = copy.deepcopy(drafts.draft_of(algorithm, name)).to("cuda")
    if algorithm != "draft_model":
        draft.embedding, draft.head_weight = target.model.embed_tokens.weight, target.lm_head.weight
    return dict(draft=draft, **options)


@functools.cache
def with_draft(algorithm, schedule, mode, name="llama", **more):
    target = drafts_target(name)
    options = drafts.SCHEDULES[schedule] | MODES[mode] | draft_for(target, algorithm, name) | more
    return speculate(target, algorithm.removesuffix("_mla"), adaptive=False, max_cache_len=200, **options)


@pytest.mark.parametrize("mode", ["graphs", "eager"])
@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "eagle3_mla", "draft_model"])
@pytest.mark.parametrize("schedule", ["chain", "tree"])
def test_drafts_and_tokens_are_the_cpus(algorithm, schedule, mode):
    system, on_cpu = with_draft(algorithm, schedule, mode), drafts.fast(algorithm, "llama", schedule)
    for batch in (1, 3):
        traces = []
        for fast in (system, on_cpu):
            ids = drafts.prompts(batch).to(fast.device)
            assert torch.equal(drafts.generated(fast, ids).cpu(), drafts.plain("llama", batch))
            traces.append(fast.speculation.stats.trace)
        assert traces[0] == traces[1]


@pytest.mark.parametrize("mode", ["graphs", "eager"])
@pytest.mark.parametrize(("algorithm", "schedule"), [("eagle3", "union"), ("draft_model", "chain union")])
def test_unions_write_the_same_tokens(algorithm, schedule, mode):
    """Matched, merged and counted inside the captured round."""
    system = with_draft(algorithm, schedule, mode)
    for batch in (1, 4, 1):
        ids = drafts.prompts(batch).cuda()
        assert torch.equal(drafts.generated(system, ids).cpu(), drafts.plain("llama", batch))
    speculation = system.speculation
    counts = speculation.engine.runtime.algorithm.counts
    assert counts.is_cuda and float(counts[0].sum()) > 10 and len(speculation.ngram) > 0
    assert torch.equal(drafts.generated(system, ids, reference=drafts.plain("llama", 1)[0]).cpu(),
                       drafts.plain("llama", 1))  # fmt: skip
    assert len(speculation.stats.acceptance_by_depth) > 4


@pytest.mark.parametrize("name", drafts.TARGETS[1:])
@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "draft_model"])
def test_drafts_of_architectures(algorithm, name):
    for schedule, batch in (("chain", 4), ("tree", 1)):
        system = with_draft(algorithm, schedule, "graphs", name)
        ids = drafts.prompts(batch).cuda()
        assert torch.equal(drafts.generated(system, ids).cpu(), drafts.plain(name, batch))


def in_16_bits(algorithm, head_dim, **options):
    """A small model with heads of a real size, in bfloat16, and `algorithm` with a draft that knows nothing."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        head_dim=head_dim, vocab_size=512, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    embedding, output = target.model.embed_tokens.weight, target.lm_head.weight
    if algorithm == "draft_model":
        draft = copy.deepcopy(target)
    elif algorithm == "eagle3":
        draft = Eagle3Head(config, embedding, taps=(1, 2, 3), feature_size=256, head_weight=output)
    elif algorithm == "eagle3_mla":
        layer = LayerKnobs(latent=LatentSizes(96, 64, 128, 64, 128, scale=192**-0.5))  # head sizes of DeepSeek, Kimi
        own = LlamaConfig(hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=64)
        draft = Eagle3Head(own, embedding, taps=(1, 2, 3), feature_size=256, head_weight=output, layer=layer)
    elif algorithm == "dflash":
        layer = LayerKnobs(num_layers=2, qk_norm=True)
        draft = DFlashDraft(config, embedding, output, (1, 2), block_size=8, mask_token_id=511, layer=layer)
    if algorithm != "ngram":
        options |= dict(
            adaptive=False, draft=draft.to("cuda", torch.bfloat16).requires_grad_(False).eval(), check=False
        )
    if algorithm in ("eagle3", "eagle3_mla", "draft_model"):
        options |= dict(num_steps=3)
    return speculate(target, algorithm.removesuffix("_mla"), max_cache_len=3584, **options)


def audited(fast):
    """The answer to a long prompt that repeats itself has no other tokens than those of near-ties."""
    ids = torch.randint(3, 500, (1, 1450), device="cuda").repeat(1, 2)
    fixed = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
    return all(row.verdict != "DIFFERENT" for row in audit(fast, [ids], **fixed).greedy)


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle3_mla", "draft_model", "dflash"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_drafts_in_16_bits_at_real_head_sizes(algorithm, head_dim):
    """Kernels take other tiles there than for the tiny models, and the prompt comes in chunks of every size."""
    fast = in_16_bits(algorithm, head_dim)
    assert audited(fast)
    assert algorithm != "draft_model" or fast.speculation.stats.accept_length > 3


@pytest.mark.parametrize("algorithm", ["ngram", "eagle3"])
@pytest.mark.parametrize("prefill, verify", [("flashinfer", "triton"), ("triton", "flashinfer")])
def test_prompts_and_trees_on_different_backends(algorithm, prefill, verify):
    pytest.importorskip("flashinfer")
    fast = in_16_bits(algorithm, 128, attention_backend={"prefill": prefill, "verify": verify})
    assert audited(fast)
    assert f"prefill by {prefill}, verify by {verify}" in fast.speculation.explain()


@pytest.mark.parametrize("schedule", ["hot", "static", "cut"])
def test_other_trees(schedule):
    system = with_draft("eagle", schedule, "graphs")
    assert torch.equal(drafts.generated(system, drafts.prompts(3).cuda()).cpu(), drafts.plain("llama", 3))


@pytest.mark.parametrize("algorithm", ["eagle", "draft_model"])
def test_drawn_drafts_are_the_cpus(algorithm):
    drawn = dict(draft_sample_method="probabilistic")
    options = drafts.SCHEDULES["chain"] | drawn | dict(compile=False, max_cache_len=200)
    draft = drafts.draft_of(algorithm, "llama")
    on_cpu = speculate(drafts.target("llama"), algorithm, draft=draft, **options)
    settings = dict(do_sample=True, temperature=0.7, top_k=20)
    answers = []
    for system in (on_cpu, *(with_draft(algorithm, "chain", mode, **drawn) for mode in ("graphs", "eager"))):
        torch.manual_seed(9)
        answers.append(drafts.generated(system, drafts.prompts(3).to(system.device), **settings).cpu())
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


def test_one_launch_a_round():
    system, ids = fast(), random_ids(100)
    system.speculation.warmup()  # a size that is built later is also timed, by launches of its own
    generated(system, ids)
    system.speculation.stats.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        generated(system, ids)
    launches = [event.name for event in seen.events() if "Launch" in event.name or "Memcpy" in event.name]
    rounds = system.speculation.stats.rounds
    prompt = 2  # and the first trees
    graphs = sum("GraphLaunch" in name for name in launches) - prompt
    assert rounds <= graphs <= rounds + AHEAD - 1  # what the stop cut off


def test_warmup_before_any_prompt_leaves_the_first_slot_alone():
    system = speculate(model("qwen3"), max_cache_len=300)
    state = system.speculation.engine.session(1).state
    system.speculation.warmup()
    assert int(state.lengths) == 0
    assert torch.equal(generated(system, random_ids(50)), plain("qwen3", 50, 1))


def test_what_cannot_be_captured_says_what_to_do(monkeypatch):
    monkeypatch.setattr(launch, "supports", lambda *arguments: False)  # without the kernel, experts wait for the GPU
    with pytest.raises(RuntimeError, match="cuda_graphs=False"):
        generated(speculate(model("mixtral"), max_cache_len=300, compile=False), random_ids(20))
    assert torch.equal(generated(fast(), random_ids(20)), plain("llama", 20, 1))


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 600])
def test_around_block_edges(length):
    assert torch.equal(generated(fast(), random_ids(length), 70), plain("llama", length, 1, new=70))


@pytest.mark.parametrize("nodes", [1, 2, 8, 64])
@pytest.mark.parametrize("adaptive", [True, False])
def test_sizes(nodes, adaptive):
    system = speculate(model(), max_cache_len=300, num_draft_tokens=nodes, adaptive=adaptive)
    assert torch.equal(generated(system, random_ids(100)), plain("llama", 100, 1))


def test_private_texts_leave_the_corpus():
    """A call with share_text=False drafts from its reference, and leaves the corpus as it was."""
    system = speculate(model(), max_cache_len=700, compile=False)
    answer, corpus = plain("llama", 33, 1), system.speculation.ngram
    corpus.add([5, 6, 7])
    held, tokens = corpus.text[: len(corpus)].tolist(), random_ids(33)
    assert torch.equal(generated(system, tokens, reference=answer[0], share_text=False), answer)
    assert system.speculation.stats.accept_length > 4
    assert corpus.text[: int(corpus.length)].tolist() == held and len(corpus) == len(held)
    assert torch.equal(generated(system, tokens), answer)
    assert corpus.text[: int(corpus.length)].tolist() == [*held, *answer[0].tolist(), -1]


def test_corpora_are_saved_and_loaded(tmp_path):
    corpus, trie = fast().speculation.ngram, NgramTrie()
    corpus.reset()
    corpus.add([[5, 6, 7, 8], [9, 10]])
    corpus.save(tmp_path / "corpus")
    trie.load(tmp_path / "corpus")
    corpus.reset()
    trie.save(tmp_path / "trie")
    corpus.load(tmp_path / "trie")
    assert corpus.text[: int(corpus.length)].tolist() == [5, 6, 7, 8, -1, 9, 10, -1]
    with pytest.raises(ValueError, match=r"max_cache_len: .* on the GPU .* GB are missing"):
        speculate(model(), max_cache_len=10**12, compile=False)


def test_padded_rows_end_on_their_own():
    ids = random_ids(40, 4)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 7, 20, 39)):
        mask[row, :padding] = 0
    answer = plain("llama", 40, 4)
    eos = [int(answer[0, 45]), int(answer[2, 60])]
    options = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0)
    want = model("llama", "cpu").generate(ids, attention_mask=mask, **options)
    got = fast().generate(ids.cuda(), attention_mask=mask.cuda(), **options)
    assert torch.equal(got.cpu(), want)


def test_drawn_tokens_are_those_of_the_walk():
    settings = dict(do_sample=True, temperature=0.5, top_k=30, top_p=0.95, min_new_tokens=5, eos_token_id=[7, 8, 9])
    on_cpu = speculate(model("llama", "cpu"), compile=False)
    for batch in (1, 3):
        torch.manual_seed(5)
        want = on_cpu.generate(random_ids(60, batch), max_new_tokens=NEW, pad_token_id=0, **settings)
        for mode in ("graphs", "eager"):
            torch.manual_seed(5)
            assert torch.equal(generated(fast("llama", mode), random_ids(60, batch), **settings), want)


@pytest.mark.parametrize(
    "settings",
    [
        dict(repetition_penalty=1.2),
        dict(no_repeat_ngram_size=3),
        dict(prefix_allowed_tokens_fn=lambda row, ids: list(range(3, 60))),
        dict(stopping_criteria=[lambda ids, scores: ids[:, -1] % 11 == 3]),
        dict(logits_processor=[lambda ids, scores: scores - 0.1 * torch.arange(scores.shape[1], device=scores.device)]),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_processors_and_criteria(settings):
    ids = random_ids(50, 2)
    options = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, **settings)
    want = model("llama", "cpu").generate(ids, **options)
    assert torch.equal(fast().generate(ids.cuda(), **options).cpu(), want)


def test_nothing_waits_before_the_first_round_and_in_the_loop():
    system = fast()
    ids = random_ids(100)
    system.speculation.warmup()
    engine = system.speculation.engine
    generated(system, ids)  # sets the tokens that end a row
    run = engine.run

    def watched(request):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield from run(request)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.run = watched
    try:
        assert torch.equal(generated(system, ids), plain("llama", 100, 1))
    finally:
        del engine.run


@pytest.mark.parametrize("mode", MODES)
def test_calls_alike_give_what_the_first_gives(mode):
    """The first is prepared by transformers."""
    system = speculate(model(), max_cache_len=700, **MODES[mode])
    for length, batch in ((100, 1), (33, 1), (100, 1), (40, 2), (41, 2)):
        ids = random_ids(length, batch)
        answer = generated(system, ids, attention_mask=torch.ones_like(ids).cuda())
        assert torch.equal(answer, plain("llama", length, batch))
    assert len(system.speculation.engine.remembered._kept) == 2


def test_a_change_is_seen_by_a_call_like_an_earlier_one():
    system, ids = speculate(copy.deepcopy(model()), max_cache_len=700), random_ids(50)
    want = generated(system, ids)
    weight = system.lm_head.weight
    system.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"lm_head\.weight was moved or replaced"):
            generated(system, ids)
    system.lm_head.weight = weight
    assert torch.equal(generated(system, ids), want)


def test_drawn_tokens_are_those_of_a_call_that_transformers_prepares():
    system, ids, answers = fast(), random_ids(50), []
    for _ in range(3):
        torch.manual_seed(5)
        answers.append(generated(system, ids, do_sample=True, temperature=0.9, top_k=30, top_p=0.9))
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


def test_ten_thousand_rounds_take_no_more_memory():
    system = speculate(model(), max_cache_len=700)
    system.speculation.warmup()
    held = None
    while system.speculation.stats.rounds < 10_000:
        generated(system, random_ids(20 + system.speculation.stats.rounds % 50), 600)
        held = held or torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() <= held


def test_a_failed_capture_leaves_the_process_usable():
    system = speculate(model(), max_cache_len=300, compile=False)
    drafter = system.speculation.engine.session(1).drafter
    whole = drafter.propose

    def waits(state, max_kv_len):
        int(state.lengths[0])  # not allowed while capturing
        whole(state, max_kv_len)

    drafter.propose = waits
    with pytest.raises(RuntimeError):
        generated(system, random_ids(20))
    drafter.propose = whole
    torch.cuda.synchronize()
    assert torch.equal(generated(system, random_ids(20)), plain("llama", 20, 1))
    assert torch.equal(generated(fast(), random_ids(20)), plain("llama", 20, 1))


def test_bfloat16_runs_and_graphs_change_nothing():
    half = models.ADMITTED["llama"]().to("cuda", torch.bfloat16)
    answers = [generated(speculate(half, max_cache_len=300, **MODES[mode]), random_ids(80)) for mode in MODES]
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[2], answers[3])


def test_refusals_name_what_to_do():
    with pytest.raises(UnsupportedModelError, match="float64"):
        speculate(models.ADMITTED["llama"]().to("cuda", torch.float64))
    with pytest.raises(UnsupportedModelError, match="max_cache_len"):
        generated(speculate(model(), max_cache_len=1 << 36), random_ids(20))


@pytest.mark.parametrize("algorithm", ["ngram", "eagle3", "draft_model"])
def test_refresh_under_captured_graphs(algorithm):
    target = copy.deepcopy(drafts.target("llama")).to("cuda")
    system = speculate(target, algorithm, max_cache_len=200, **draft_for(target, algorithm, num_steps=2))
    on_cpu, ids = copy.deepcopy(drafts.target("llama")), drafts.prompts(2)
    assert torch.equal(generated(system, ids), drafts.generated(on_cpu, ids, NEW))
    captured = [step for session in system.speculation.engine.sessions.values() for step in session.made.values()]
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        new = {
            name: value + 0.1 * torch.randn(value.shape, generator=generator)
            for name, value in on_cpu.state_dict().items()
        }
        on_cpu.load_state_dict(new)
        target.load_state_dict({name: value.cuda() for name, value in new.items()}, assign=True)
        with pytest.raises(RuntimeError, match=r"embed_tokens\.weight was moved or replaced .*refresh\(\)"):
            generated(system, ids)
        system.speculation.refresh()
        assert torch.equal(generated(system, ids), drafts.generated(on_cpu, ids, NEW))
        with torch.no_grad():
            for model in (target, on_cpu):
                model.lm_head.weight.mul_(-1.0)  # in place: the graphs read the same memory
        assert torch.equal(generated(system, ids), drafts.generated(on_cpu, ids, NEW))
    target.cpu()
    with pytest.raises(ValueError, match=r"on cuda:0 at speculate\(\) and is .* on cpu now.*call speculate\(\) again"):
        system.speculation.refresh()
    target.cuda()
    system.speculation.refresh()
    assert torch.equal(generated(system, ids), drafts.generated(on_cpu, ids, NEW))
    steps = [step for session in system.speculation.engine.sessions.values() for step in session.made.values()]
    assert all(step is before for step, before in zip(steps, captured))


class Nested(LogitsProcessor):
    """A streamer and a logits processor that calls generate() in the midst of an answer."""

    def __init__(self, system, ids):
        self.system, self.ids, self.calls, self.answers = system, ids, 0, []

    def put(self, value):
        self.calls += 1
        if self.calls in (3, 9):
            self.answers.append(drafts.generated(self.system, self.ids, 12).cpu())

    def end(self):
        pass

    def __call__(self, input_ids, scores):
        self.put(None)
        return scores


@pytest.mark.parametrize("mode", ["graphs", "eager graphs"])
@pytest.mark.parametrize("algorithm", ["ngram", "eagle3", "draft_model"])
def test_calls_inside_a_call(algorithm, mode):
    target = drafts_target("llama")
    options = dict(max_cache_len=200, **MODES[mode])
    system = speculate(target, **options) if algorithm == "ngram" else with_draft(algorithm, "tree", mode)
    ids, inner = drafts.prompts(1), drafts.prompts(2)[:1, 4:]
    want = drafts.generated(drafts.target("llama"), inner, 12)
    for more in (lambda nested: dict(streamer=nested), lambda nested: dict(logits_processor=[nested])):
        nested = Nested(system, inner.cuda())
        assert torch.equal(drafts.generated(system, ids.cuda(), **more(nested)).cpu(), drafts.plain("llama", 1))
        assert len(nested.answers) == 2 and all(torch.equal(answer, want) for answer in nested.answers)


@pytest.mark.parametrize("algorithm", ["ngram", "eagle3", "draft_model"])
def test_a_cache_grows_when_a_call_needs_more(algorithm, caplog):
    target = drafts_target("llama")
    system = speculate(target, algorithm, max_cache_len=40, **draft_for(target, algorithm, num_steps=3))
    ids = drafts.prompts(2)
    for new in (8, 100):
        want = drafts.generated(drafts.target("llama"), ids, new)
        assert torch.equal(drafts.generated(system, ids.cuda(), new).cpu(), want)
    said = [record.getMessage() for record in caplog.records if record.name == "spec_compile"]
    assert sum("grows to 123" in line for line in said) == 1


def test_a_forked_process_is_told_to_spawn():
    system, (read, write) = fast(), os.pipe()
    generated(system, random_ids(20))
    child = os.fork()
    if child == 0:
        try:
            system.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert "spawn" in pipe.read()
    os.waitpid(child, 0)
    assert torch.equal(generated(system, random_ids(20)), plain("llama", 20, 1))


def test_graphs_have_workspaces_of_their_own():
    """``torch.compile(mode="reduce-overhead")`` frees those of cuBLAS, whose memory then is anyone's."""
    system = speculate(model(), max_cache_len=700)
    system.speculation.warmup()
    product = torch.compile(lambda x: x @ x, mode="reduce-overhead")
    for _ in range(4):
        product(torch.ones(512, 512, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    for length in (200, 33):
        assert torch.equal(generated(system, random_ids(length)), plain("llama", length, 1))
