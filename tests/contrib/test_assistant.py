"""Gemma 4's assistants: their drafts against transformers', answers against plain decoding's, checkpoints."""

import copy
import functools
import inspect
import itertools
import json
from types import SimpleNamespace

import assistants
import draft_rounds as rounds
import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from spec_compile import UnsupportedModelError, speculate
from spec_compile.capture.admit import admit
from spec_compile.contrib import assistant
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.runtime.draft_budget import WholeTreeBudget

NEWEST = pytest.mark.skipif(
    "model_kwargs" in inspect.signature(SinglePositionMultiTokenCandidateGenerator).parameters,
    reason="transformers 5.17 shows assistants other keys",
)
NAMES = [*assistants.SIZES]
SCHEDULES = {"chain": dict(num_steps=3), "tree": dict(num_steps=3, topk=3, num_draft_tokens=8)}


@functools.cache
def fast(name, schedule="chain", **options):
    options = dict(compile=False, adaptive=False, check=False, max_cache_len=200) | options
    draft = assistants.assistant(name)
    return models.speculate_captured(assistants.target(name), "assistant", draft=draft, **SCHEDULES[schedule] | options)


@functools.cache
def plain(name, batch):
    return rounds.generated(assistants.target(name), rounds.prompts(batch))


@NEWEST
@pytest.mark.sweep("12B")
@pytest.mark.parametrize("name", NAMES)
def test_chains_are_those_of_transformers(name):
    """In texts that are longer than the window of sliding layers."""

    def look(session, row, text):
        assert rounds.tree_of(session, row) == ([text[-1], *assistants.drafted(name, text, 3)], [-1, 0, 1, 2])

    answer, checked = rounds.followed(fast(name), rounds.prompts(3), look)
    assert torch.equal(answer, plain(name, 3)) and checked > 20
    assert 1.3 < fast(name).speculation.stats.accept_length < 4


@NEWEST
@pytest.mark.slow
def test_drafts_after_rounds_without_any_are_the_same(monkeypatch):
    """The assistant learns the newest state of the rounds in which it was silent, at once or two tokens late."""
    monkeypatch.setattr("spec_compile.runtime.pipeline.MOST_LATE", 2)
    pattern = itertools.cycle([4, 1, 1, 4, 2, 1, 1, 1])
    monkeypatch.setattr(WholeTreeBudget, "choose", lambda policy, *known: next(pattern))

    def look(session, row, text):
        tokens, _ = rounds.tree_of(session, row)
        assert tokens[1:] == assistants.drafted("31B", text, 3)[: len(tokens) - 1]

    answer, checked = rounds.followed(fast("31B", adaptive=True), rounds.prompts(1), look)
    assert torch.equal(answer, plain("31B", 1)) and checked >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_trees_are_grown_from_transformers_forward(name):
    system = fast(name, "tree")
    schedule = system.speculation.engine.runtime.algorithm.schedule

    def look(session, row, text):
        assert rounds.tree_of(session, row) == assistants.grown(name, text, schedule)

    answer, checked = rounds.followed(system, rounds.prompts(3), look)
    assert torch.equal(answer, plain(name, 3)) and checked > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_union_with_ngrams_changes_no_answer(name):
    union = fast(name, "tree", ngram=True)
    assert torch.equal(rounds.generated(union, rounds.prompts(3)), plain(name, 3))
    assert union.speculation.stats.accept_length > 1.3


@pytest.mark.slow
def test_trees_over_caches_of_8_bits():
    """The answer is that of rounds without drafts over such a cache."""
    ids, system = rounds.prompts(3), fast("E2B", "tree", kv_cache_dtype="fp8_per_token_head")
    assert torch.equal(rounds.generated(system, ids), rounds.generated(system, ids, speculation=False))
    assert system.speculation.stats.accept_length > 1.3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compiled_rounds_draft_the_same(name, schedule):
    answer = rounds.same_when_compiled(lambda compile: fast(name, schedule, compile=compile), rounds.prompts(3))
    assert torch.equal(answer, plain(name, 3))


def test_requests_of_a_batch_have_the_answers_of_generate():
    prompts = [rounds.prompts(1, length)[0].tolist() for length in (1, 5, 23, 12, 30)]
    config = dict(max_new_tokens=16, do_sample=False, eos_token_id=-1)
    outputs = fast("E2B").generate_batch(prompts, **config)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        wanted = rounds.generated(assistants.target("E2B"), torch.tensor([prompt]), 16)[0, len(prompt) :]
        assert output.generated_tokens == wanted.tolist()


def test_a_cluster_that_is_not_chosen_is_never_drafted():
    """Scores are products with the rows of the chosen clusters' tokens."""
    torch.manual_seed(0)
    order, weight, x = torch.randperm(12), torch.randn(12, 5), torch.randn(2, 3, 5)
    centroids = torch.nn.Linear(5, 4, bias=False)
    clusters = SimpleNamespace(centroids=centroids, token_ordering=order, centroid_intermediate_top_k=2)
    logits = assistant.clustered_logits(x, weight, clusters)
    chosen = (x @ centroids.weight.T).topk(2).indices
    for row in range(2):
        for node in range(3):
            tokens = {int(t) for cluster in chosen[row, node] for t in order[3 * cluster : 3 * cluster + 3]}
            assert {int(t) for t in logits[row, node].isfinite().nonzero()[:, 0]} == tokens
            for token in tokens:
                assert torch.allclose(logits[row, node, token], weight[token] @ x[row, node], atol=1e-5)


# --- checkpoints


@pytest.fixture
def folder(tmp_path):
    assistants.assistant("E2B").save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_is_read_as_the_module(folder):
    model = assistants.target("E2B")
    read, wrapped = load_head(folder, model), load_head(assistants.assistant("E2B"), model, "assistant")
    assert read.sources == wrapped.sources and read.state_dict().keys() == wrapped.state_dict().keys()
    assert all(torch.equal(value, wrapped.state_dict()[name]) for name, value in read.state_dict().items())
    assert torch.equal(read.rotary_emb.full_attention_inv_freq, wrapped.rotary_emb.full_attention_inv_freq)
    assert assistants.assistant("E2B").model.config._attn_implementation == "sdpa"  # the user's own is as it was


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda tensors, config: tensors.pop("post_projection.weight"), "has no post_projection.weight"),
        (lambda tensors, config: tensors.update(extra=torch.ones(2)), "does not know: extra"),
        (lambda tensors, config: tensors["masked_embedding.token_ordering"].fill_(1), "token_ordering"),
        (lambda tensors, config: tensors["pre_projection.weight"].resize_(64, 96), "pre_projection.weight is"),
        (lambda tensors, config: config.update(backbone_hidden_size=96), "hidden_size 96"),
        (lambda tensors, config: config["text_config"].update(vocab_size=97), "vocab_size 97"),
        (lambda tensors, config: config["text_config"].update(num_key_value_heads=1), "reads 1 heads of 16, layer 3"),
        (lambda tensors, config: config.update(num_centroids=13), "num_centroids 13"),
    ],
)
def test_what_does_not_fit_is_named(folder, edit, named):
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    edit(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=named):
        load_head(folder, assistants.target("E2B"), "assistant")


def test_other_models_and_drafts_are_refused(folder):
    with pytest.raises(ValueError, match="reads the keys and values of Gemma 4; LlamaForCausalLM"):
        speculate(rounds.target("llama"), "assistant", draft=str(folder))
    with pytest.raises(ValueError, match="reads 2 heads of 32"):
        speculate(assistants.target("31B"), "assistant", draft=str(folder))
    with pytest.raises(TypeError, match="an assistant of transformers"):
        speculate(assistants.target("31B"), "assistant", draft=rounds.target("llama"))
    with pytest.raises(UnsupportedModelError, match=r"attention_backend: .* by 'sdpa' only, not by 'flashinfer'"):
        speculate(assistants.target("E2B"), "assistant", draft=str(folder), attention_backend={"draft": "flashinfer"})
    with pytest.raises(ValueError, match="holds a head for algo='assistant'"):
        speculate(assistants.target("E2B"), "eagle3", draft=str(folder))
    with pytest.raises(ValueError, match="needs an assistant of a Gemma 4 or"):
        speculate(assistants.target("E2B"), "assistant")
    assert not assistant.is_assistant(assistant.DraftFiles("examples/tiny_coder/heads/eagle3"))


def test_ranks_that_share_the_target_are_refused():
    options = SimpleNamespace(ranks=SimpleNamespace(size=2), draft=assistants.assistant("E2B"))
    with pytest.raises(UnsupportedModelError, match="tensor_parallel"):
        assistant.build(admit(assistants.target("E2B")), options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in NAMES if name in ("E2B", "12B")])
def test_answers_on_a_gpu(name, schedule, dtype):
    """Inside CUDA graphs; then with cached keys in 8 bits."""
    made = assistants.target(name), assistants.assistant(name)
    model, draft = (copy.deepcopy(each).to("cuda", dtype) for each in made)
    ids, options = rounds.prompts(3).cuda(), dict(draft=draft, adaptive=False, max_cache_len=256) | SCHEDULES[schedule]
    system = speculate(model, "assistant", **options)
    assert torch.equal(rounds.generated(system, ids), rounds.generated(system, ids, speculation=False))
    assert system.speculation.stats.accept_length > 1.1
    for kept in ("fp8", "fp8_per_token_head") if dtype == torch.bfloat16 else ():
        small = speculate(model, "assistant", **options, kv_cache_dtype=kept)
        assert torch.equal(rounds.generated(small, ids), rounds.generated(small, ids, speculation=False))
        assert small.speculation.stats.accept_length > 1.1
