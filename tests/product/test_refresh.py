"""refresh() takes over new weights: then the answer is that of the model as it is, and graphs stay as they were."""

import copy
import gc
import threading
import weakref

import draft_rounds as drafts
import models
import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from spec_compile import speculate
from spec_compile.cache import Cache
from spec_compile.compat import CACHE
from spec_compile.drafters.modules.dflash import DFlashDraft
from spec_compile.drafters.modules.layers import LayerKnobs
from spec_compile.passes.outputs import FINAL
from spec_compile.runtime.state import State

NEW = 20
OPTIONS = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
IDS = drafts.prompts(2)


def state(model, seed=1):
    """Other weights for a model."""
    torch.manual_seed(seed)
    return {name: value + 0.1 * torch.randn_like(value) for name, value in model.state_dict().items()}


def assert_same(model, fast):
    assert torch.equal(fast.generate(IDS, **OPTIONS), model.generate(IDS, **OPTIONS))


def dflash(model):
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=96
    )
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    knobs = LayerKnobs(num_layers=2, qk_norm=True)
    return DFlashDraft(config, embedding, output, (0, FINAL), 4, 0, knobs).requires_grad_(False).eval()


def draft_of(algorithm, model):
    """A draft of its own for `model`, which shares its embedding and output matrix."""
    if algorithm == "dflash":
        return dflash(model)
    draft = copy.deepcopy(drafts.draft_of(algorithm, "llama"))
    if algorithm != "draft_model":
        draft.embedding, draft.head_weight = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return draft


SYSTEMS = {
    "ngram": ("ngram", {}),
    "ngram, separate linears": ("ngram", dict(merge_linears=False)),
    "eagle3 of some tokens": ("eagle3", dict(num_steps=2, token_map=[*range(90, 20, -1)])),
    "dflash": ("dflash", {}),
    "draft_model": ("draft_model", dict(num_steps=2)),
}


def system(name, **more):
    algorithm, options = SYSTEMS[name]
    model = copy.deepcopy(drafts.target("llama")).requires_grad_(True)
    draft = {} if algorithm == "ngram" else {"draft": draft_of(algorithm, model)}
    options = dict(compile=False, adaptive=False, check=False, max_cache_len=100) | options | more
    return model, draft.get("draft"), speculate(model, algorithm, **draft, **options)


@pytest.mark.sweep(["ngram", "eagle3 of some tokens"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_training_and_loading_between_answers(name):
    model, draft, fast = system(name)
    assert_same(model, fast)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    before = model.generate(IDS, **OPTIONS)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        assert_same(model, fast)  # steps are in place
    assert not torch.equal(model.generate(IDS, **OPTIONS), before)
    memory = [slot.storage.data_ptr() for slot in fast.speculation.engine.weights.slots]
    if draft is not None:
        own = {path: value for path, value in state(draft).items() if path not in ("embedding", "head_weight")}
        draft.load_state_dict(own, assign=True, strict=False)
        with pytest.raises(RuntimeError, match=r"draft\..* was moved or replaced .*refresh\(\)"):
            fast.generate(IDS, **OPTIONS)
    model.load_state_dict(state(model), assign=True)
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight was moved or replaced .*refresh\(\)"):
        fast.generate(IDS, **OPTIONS)
    fast.speculation.refresh()
    assert_same(model, fast)
    assert memory == [slot.current.data_ptr() for slot in fast.speculation.engine.weights.slots]
    if draft is not None:
        assert_as_if_anew(model, draft, fast, name)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # without gradients: nothing
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.7)  # in place again
    assert_same(model, fast)


def assert_as_if_anew(model, draft, fast, name):
    """Every tree is that of a system which was made for the weights of now."""
    algorithm, options = SYSTEMS[name]
    anew = speculate(
        model, algorithm, draft=draft, adaptive=False, compile=False, check=False, max_cache_len=100, **options
    )
    trees = []
    for speculation, generate in ((each.speculation, each.generate) for each in (fast, anew)):
        with speculation.recording():
            generate(IDS, **OPTIONS)
        trees.append([one.rows for one in speculation.engine.recording.rounds])
    assert trees[0] == trees[1]


@pytest.mark.slow
def test_compiled_rounds_go_on():
    model, _, fast = system("ngram", compile=True, num_draft_tokens=1)
    assert_same(model, fast)
    compiled = fast.speculation.stats.seconds["compile"]
    model.load_state_dict(state(model), assign=True)
    fast.speculation.refresh()
    assert_same(model, fast)
    assert fast.speculation.stats.seconds["compile"] == compiled


MOVES = {
    "to and back": lambda model: model.double().float(),
    "replaced": lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.randn(models.VOCAB, 64))),
    "not contiguous": lambda model: setattr(model.lm_head.weight, "data", torch.randn(64, models.VOCAB).t()),
    "transposed": lambda model: setattr(
        model.model.layers[0].self_attn.q_proj.weight, "data", model.model.layers[0].self_attn.q_proj.weight.data.t()
    ),
    "swapped": lambda model: swap(*(layer.mlp.up_proj.weight for layer in model.model.layers)),
    "buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 0.5),
    "nothing": lambda model: None,
}


def swap(a, b):
    a.data, b.data = b.data, a.data


@pytest.fixture(scope="module")
def shared():
    """One system for the tests that leave it as good as they got it."""
    return system("ngram")


@pytest.mark.parametrize("move", MOVES)
def test_whatever_moved(move, shared):
    model, _, fast = shared
    MOVES[move](model)
    held = [(name, tensor) for name, tensor in model.named_parameters()]
    fast.speculation.refresh()
    assert_same(model, fast)
    assert all(tensor is now for (_, tensor), now in zip(held, model.parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    assert_same(model, fast)


def test_loading_inside_inference_mode(shared):
    model, _, fast = shared
    with torch.inference_mode():
        model.load_state_dict(state(model), assign=True)
        fast.speculation.refresh()
    assert_same(model, fast)


def test_tied_weights_stay_tied():
    model = models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, tie_word_embeddings=True))
    fast = speculate(model, compile=False, check=False)
    new = torch.randn(96, 64)
    both = {"lm_head.weight": new, "model.embed_tokens.weight": new}
    model.load_state_dict(state(model) | both, assign=True)
    fast.speculation.refresh()
    assert_same(model, fast)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.5)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert_same(model, fast)
    model.model.embed_tokens.weight = nn.Parameter(torch.randn(96, 64))
    with pytest.raises(ValueError, match=r"were one tensor at speculate.*tie_weights"):
        fast.speculation.refresh()
    model.tie_weights()
    fast.speculation.refresh()
    assert_same(model, fast)


REFUSED = {
    "shape": (lambda w: torch.randn(96, 65), r"was float32 \[96, 64\] on cpu at speculate\(\) and is .* \[96, 65\]"),
    "dtype": (lambda w: w.half(), r"was float32 .* and is float16 \[96, 64\] on cpu now; call speculate\(\) again"),
    "meta": (lambda w: w.to("meta"), r"is on the meta device"),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_copied(problem, shared):
    model, _, fast = shared
    fast.speculation.refresh()
    weights = model.model.embed_tokens.weight, model.lm_head.weight
    embedding = model.model.embed_tokens.weight.detach().clone()
    memory = fast.speculation.engine.weights.slots[0].storage
    make, message = REFUSED[problem]
    model.model.embed_tokens.weight = nn.Parameter(torch.zeros(96, 64))  # this one would fit
    model.lm_head.weight = nn.Parameter(make(model.lm_head.weight.detach()))
    with pytest.raises(ValueError, match=r"lm_head\.weight " + message):
        fast.speculation.refresh()
    assert torch.equal(memory, embedding)
    model.model.embed_tokens.weight, model.lm_head.weight = weights
    assert_same(model, fast)


def test_other_changes_are_refused(shared):
    model, _, fast = shared
    first, second = (layer.mlp.up_proj for layer in model.model.layers)
    weights = first.weight, second.weight
    one = nn.Parameter(first.weight.detach().clone())
    for first.weight, second.weight in ((one, one), weights[:1] * 2, weights[1:] * 2):
        with pytest.raises(ValueError, match=r"up_proj\.weight became the tensor of .*up_proj\.weight"):
            fast.speculation.refresh()
    first.weight, second.weight = weights
    with pytest.raises(ValueError, match=r"self_attn\.scaling was .*speculate\(\) again"):
        model.model.layers[0].self_attn.scaling = 0.5
        fast.speculation.refresh()
    model.model.layers[0].self_attn.scaling = 0.25
    model.train()
    fast.speculation.refresh()
    model.eval()
    assert_same(model, fast)


def test_merged_adapters():
    model = peft.get_peft_model(models.ADMITTED["llama"](), peft.LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")).eval()  # fmt: skip
    fast = speculate(model, compile=False, check=False)
    assert_same(model, fast)
    adapter = {name: 2 * value for name, value in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, adapter)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.clone()  # moved
    fast.speculation.refresh()
    assert_same(model, fast)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged_adapters was \[\] .* is \['default'\] now.*speculate\(\) again"):
        fast.speculation.refresh()
    model.unmerge_adapter()
    fast.speculation.refresh()
    assert_same(model, fast)
    plain = models.ADMITTED["llama"]()
    fast = speculate(plain, compile=False, check=False)
    plain.load_state_dict(model.merge_and_unload().state_dict(), assign=True)
    fast.speculation.refresh()
    assert_same(plain, fast)


@pytest.mark.parametrize("name", ["refresh", "release"])
def test_generate_in_this_thread_is_refused_and_in_another_waited_for(shared, name):
    model, _, fast = shared
    method = getattr(fast.speculation, name)
    events, entered, going_on = [], threading.Event(), threading.Event()

    class Streamer:
        def __init__(self, called):
            self.called = called

        def put(self, tokens):
            self.called()

        def end(self):
            events.append("generated")

    with pytest.raises(RuntimeError, match=rf"{name}\(\).*generate\(\).* is running"):
        fast.generate(IDS[:1], **OPTIONS, streamer=Streamer(method))

    def wait():
        entered.set()
        going_on.wait()

    running = threading.Thread(target=fast.generate, args=(IDS[:1],), kwargs=dict(OPTIONS, streamer=Streamer(wait)))
    running.start()
    entered.wait()

    def call():
        method()
        events.append(name)

    calling = threading.Thread(target=call)
    calling.start()
    calling.join(timeout=0.2)
    going_on.set()
    running.join()
    calling.join()
    assert events == ["generated", name]
    assert_same(model, fast)


@pytest.mark.parametrize("name", ["ngram", "dflash"])
def test_release_gives_back_all_rows(name):
    model, _, fast = system(name)
    speculation, smaller = fast.speculation, models.ADMITTED["llama"]()
    code, spoken = speculation.engine.runtime.parts, speculation.stats.tokens

    def run():
        """Calls with all kinds of rows; returns all buffers that they have left."""
        assert_same(model, fast)
        fast.generate(IDS[:1], **OPTIONS | {"max_new_tokens": 3}, assistant_model=smaller)
        fast.generate(IDS[:1], **OPTIONS | {"max_new_tokens": 80})  # the cache grows
        for persistent in (False, True):
            fast.generate_batch(IDS.tolist(), max_new_tokens=4, warmup=False, persistent_manager=persistent)
        return [weakref.ref(each) for each in gc.get_objects() if isinstance(each, State | Cache)]

    kept = {id(each) for each in gc.get_objects() if isinstance(each, State | Cache)}
    left = [ref for ref in run() if id(ref()) not in kept]
    assert len(left) > 8
    speculation.release()
    assert not speculation.engine.sessions and speculation.engine.runtime.parts is code
    assert [ref for ref in left if ref() is not None] == []
    assert_same(model, fast)
    assert speculation.stats.tokens > spoken
    with fast.continuous_batching_context_manager(warmup=False) as manager:
        speculation.release()  # a manager that runs keeps its rows
        manager.add_request(IDS[0].tolist(), max_new_tokens=NEW, eos_token_id=-1)
        answer = manager.get_result().generated_tokens
    assert answer == model.generate(IDS[:1], **OPTIONS)[0, IDS.shape[1] :].tolist()


def test_a_draft_uses_no_keys_of_earlier_weights():
    model, _, fast = system("draft_model")
    asked = dict(OPTIONS, return_dict_in_generate=True, use_cache=True)
    first = fast.generate(IDS, **asked)
    fast.speculation.refresh()
    assert all(session.answers == [] for session in fast.speculation.engine.sessions.values())
    ids = first.sequences
    mask = torch.ones_like(ids)
    again = fast.generate(ids, **asked, attention_mask=mask, **{CACHE: first[CACHE]}).sequences
    assert torch.equal(again, model.generate(ids, attention_mask=mask, **OPTIONS))
