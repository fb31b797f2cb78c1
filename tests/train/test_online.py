"""A draft that learns while it serves: it is accepted more often, answers stay, memory and time are bounded."""

import copy
import time
from types import SimpleNamespace

import draft_rounds as drafts
import models
import pytest
import torch
from batch_requests import collect, managed
from trainings import NEEDS_GPU
from transformers import LlamaConfig

from spec_compile import UnsupportedModelError, speculate, train_while_serving
from spec_compile.__main__ import main
from spec_compile.drafters.checkpoints.files import Target
from spec_compile.drafters.modules.dflash import DFlashDraft
from spec_compile.drafters.modules.eagle import Eagle3Head, EagleHead
from spec_compile.drafters.modules.layers import LayerKnobs
from spec_compile.drafters.modules.mtp import MtpHead, block_config
from spec_compile.drafting import DraftPlan
from spec_compile.passes.outputs import FINAL
from spec_compile.train import online as module
from spec_compile.train.loop import Updates
from spec_compile.train.online import Ring, draft_of, trained_copy
from spec_compile.train.trainer import copy_weights

OWN = dict(eos_token_id=None, pad_token_id=0)
KINDS = ("eagle3", "eagle", "mtp", "dflash")
CONFIG = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=models.VOCAB,
)  # fmt: skip


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    """Steps are made when a test says so."""
    monkeypatch.setattr(module.background, "care_for", lambda chore: None)


def random_head(kind, model=None):
    model, config = model or drafts.target("llama"), LlamaConfig(**CONFIG)
    shared = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    torch.manual_seed(1)
    head = {
        "eagle3": lambda: Eagle3Head(config, shared[0], (1, 0, FINAL), 64, head_weight=shared[1]),
        "eagle": lambda: EagleHead(config, *shared),
        "mtp": lambda: MtpHead(model.get_decoder(), block_config(model.config, sparse=False), *shared),
        "dflash": lambda: DFlashDraft(config, *shared, (0, FINAL), 4, 0, LayerKnobs(num_layers=1, qk_norm=True)),
    }[kind]()
    return head.requires_grad_(False).eval()


def system(kind="eagle3", **options):
    steps = {} if kind == "dflash" else {"num_steps": 2}
    common = dict(compile=False, check=False, adaptive=False, max_cache_len=128)
    return speculate(drafts.target("llama"), kind, draft=random_head(kind), **steps, **common | options)


def prompts(seed, rows=8):
    return torch.randint(3, 9, (rows, 6), generator=torch.Generator().manual_seed(seed))


def ask(fast, seed, do_sample=False):
    torch.manual_seed(seed)
    ids = prompts(seed).to(fast.device)
    return fast.generate(ids, max_new_tokens=24, do_sample=do_sample, top_k=0, **OWN)


def learning(kind="eagle3", calls=2, **options):
    """A model whose draft learns, after some calls, and its training."""
    fast = system(kind)
    online = train_while_serving(fast, **options)
    for seed in range(calls):
        ask(fast, seed)
    return fast, online


def train(online, most=500):
    """Make all steps that the texts are worth."""
    while online.waits and online.steps < most:
        online.work()
    assert not online.fault


def accepted(fast, seed=99):
    stats = fast.speculation.stats
    stats.reset()
    ask(fast, seed)
    return stats.accept_length


@pytest.mark.sweep("eagle3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_poor_head_is_accepted_more_often(kind):
    fast, online = learning(kind, 0, steps_between_swaps=20, learning_rate=5e-3)
    assert fast.speculation.online is online
    before = accepted(fast)
    for seed in range(25):
        ask(fast, seed)
    assert accepted(fast) == before
    train(online)
    assert online.swaps and online.acceptance[1] >= online.acceptance[0]
    assert accepted(fast) > before + 0.02


def test_answers_keep_their_bits():
    """Before, between and after swaps, in calls and in requests, greedy and sampled."""
    plain, fast = system(), system()
    expected = [ask(plain, seed, do_sample=seed % 2 == 1) for seed in range(8)]
    online, answers = train_while_serving(fast, steps_between_swaps=1, learning_rate=5e-3), []
    for seed in range(8):
        answers.append(ask(fast, seed, do_sample=seed % 2 == 1))
        online.ring.texts += 1  # or the tenth text of each call would be in the same row
        online.work()
    assert online.swaps >= 2
    assert all(map(torch.equal, answers, expected))


def test_requests_go_on_through_swaps():
    fast, online = learning(steps_between_swaps=1, learning_rate=5e-3)
    rows = prompts(5).tolist() + prompts(6).tolist()
    expected = system().generate(torch.tensor(rows), max_new_tokens=60, do_sample=False, **OWN)
    with managed(fast, slots=4) as manager:
        names = manager.add_requests(rows, max_new_tokens=60, eos_token_id=-1)
        while manager.active_requests:
            with online.turns.between(0.2) as is_mine:
                if is_mine:
                    online.work()
        outputs = collect(manager, len(rows))
        figures = manager.metrics()["online_training"]
    assert online.swaps and not online.fault
    for name, row, answer in zip(names, rows, expected):
        assert outputs[name].generated_tokens == answer[len(row) :].tolist()
    assert figures["swaps_total"] == online.swaps and online.ring.texts == 16 + len(rows)


def test_texts_that_are_for_nobody_else_are_not_kept():
    fast, online = learning(calls=0)
    fast.generate(prompts(1), max_new_tokens=8, share_text=False, **OWN)
    assert online.ring.texts == 0
    fast.generate(prompts(1), max_new_tokens=8, **OWN)
    assert online.ring.texts == 8


def test_memory_is_bounded():
    ring = Ring(1000, 4)
    for number in range(200):
        ring.add([1] * 30, [number % 90] * (1 + number % 60))
        kept = [*ring.part(True), *ring.part(False)]
        assert sum(len(piece.ids) for piece in kept) == ring.tokens <= 1000
        assert all(piece.ids.untyped_storage().nbytes() == 4 * len(piece.ids) for piece in kept)
    assert ring.tokens > 900
    newest = ring.part(False)[-1]
    assert newest.ids.tolist() == [1] * 30 + [198 % 90] * (1 + 198 % 60)
    assert newest.supervised.tolist() == [False] * 30 + [True] * (1 + 198 % 60)
    assert [len(piece.ids) - 30 for piece in ring.part(True)][-1] == 1 + 199 % 60


def test_a_long_text_is_cut():
    ring = Ring(1 << 12, 4)
    assert ring.add([1] * 100, [2] * 1000) == 3
    assert [len(piece.ids) for piece in ring.part(False)] == [512, 512, 76]


def test_training_keeps_to_its_share_of_the_time(monkeypatch):
    _, online = learning(calls=3, share=0.05)
    now = [100.0]

    def slow_step():
        now[0] += 0.5
        online.steps += 1

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(online, "_step", slow_step)
    begin = now[0]
    while now[0] < begin + 60:
        if online.has_work():
            online.work()
        now[0] += 0.01
        assert online.seconds <= 0.05 * (now[0] - begin) + 0.5
    assert online.steps == 6


def test_worse_weights_are_dropped(monkeypatch):
    _, online = learning(steps_between_swaps=1)
    served = copy.deepcopy(online._served.module.state_dict())
    rate = online._updates.learning_rate
    monkeypatch.setattr(Updates, "count", lambda *given: torch.tensor([[[9, 3], [9, 1]], [[9, 4], [9, 1]]]))
    online.work()
    assert (online.dropped, online.swaps) == (1, 0) and online._updates.learning_rate == rate / 2
    assert online.acceptance == (pytest.approx(4 / 9), pytest.approx(3 / 9))
    for name, value in online._updates.parameters.items():
        assert torch.equal(value, served[name]) and torch.equal(online._served.module.state_dict()[name], value)
    assert "1 dropped" in str(online)


def test_an_error_ends_the_training_and_not_the_answers(monkeypatch):
    fast, online = learning()
    monkeypatch.setattr(online, "_step", lambda: 1 / 0)
    online.work()
    assert "ZeroDivisionError" in online.fault and not online.waits
    assert torch.equal(ask(fast, 3), ask(system(), 3))


def test_the_thread_trains(monkeypatch):
    monkeypatch.undo()
    _, online = learning(calls=1, share=0.2)
    deadline = time.monotonic() + 60
    while not online.steps and time.monotonic() < deadline:
        time.sleep(0.02)
    assert online.steps and not online.fault


def test_the_trained_copy_leaves_the_target_alone():
    model = copy.deepcopy(drafts.target("llama")).bfloat16()
    head = Eagle3Head(
        LlamaConfig(**CONFIG), model.get_input_embeddings().weight, (1, 0), 64,
        head_weight=model.get_output_embeddings().weight,
    ).bfloat16()  # fmt: skip
    copied = trained_copy(head, Target.of(model))
    assert {each.dtype for each in copied.parameters()} == {torch.float32}
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert {"embedding", "head_weight"}.isdisjoint(dict(copied.named_parameters()))
    with torch.no_grad():
        copied.fc.weight.fill_(0.3)
    copy_weights(dict(copied.named_parameters()), head)
    assert torch.equal(head.fc.weight, torch.full_like(head.fc.weight, 0.3)) and head.fc.weight.dtype == torch.bfloat16


def test_a_head_joined_with_ngrams_learns():
    fast = system(ngram=True)
    online = train_while_serving(fast, steps_between_swaps=2)
    assert online._trainer.steps == 2
    ask(fast, 0)
    ask(fast, 1)
    online.work()
    online.work()
    assert online.swaps + online.dropped == 1 and not online.fault


def test_figures_are_for_prometheus():
    metrics = pytest.importorskip("spec_compile.serve.metrics")
    online = train_while_serving(system())
    assert metrics.ONLINE.keys() == online.figures().keys()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(share=0.5), ValueError, "share must be above 0 and at most 0.2"),
        (dict(buffer_tokens=3), ValueError, "buffer_tokens"),
        (dict(bufer_tokens=300), TypeError, "did you mean|Did you mean"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        train_while_serving(system(), **options)


def test_drafts_that_cannot_learn_are_refused(monkeypatch):
    model = drafts.target("llama")
    with pytest.raises(TypeError, match=r"expected a result of speculate\(\)"):
        train_while_serving(model)
    with pytest.raises(UnsupportedModelError, match="not those of Recycle"):
        train_while_serving(speculate(model, compile=False, check=False))
    draft = random_head("eagle3")
    draft.fc.weight = torch.nn.Parameter(draft.fc.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="quantised"):
        draft_of(SimpleNamespace(head=draft, plan=DraftPlan(4)))
    with pytest.raises(UnsupportedModelError, match="probabilistic"):
        train_while_serving(system(draft_sample_method="probabilistic"))
    fast = system()
    monkeypatch.setattr(module, "BYTES", 1 << 40)
    with pytest.raises(UnsupportedModelError, match="GB are free"):
        train_while_serving(fast)
    monkeypatch.undo()
    train_while_serving(fast)
    with pytest.raises(ValueError, match="learns already"):
        train_while_serving(fast)


def test_the_server_learns_if_it_is_told_to(monkeypatch):
    pytest.importorskip("uvicorn")
    fast = system()
    server = SimpleNamespace(model=fast)
    runner = SimpleNamespace(run=lambda: None, has_failed=False)
    monkeypatch.setattr("spec_compile.serve.server.build", lambda *given, **flags: server)
    monkeypatch.setattr("spec_compile.serve.runner.Runner", lambda server, grace, **door: runner)
    assert main(["serve", "MODEL"]) == 0 and fast.speculation.online is None
    assert main(["serve", "MODEL", "--online-training", '{"share": 0.5}']) == 2
    assert main(["serve", "MODEL", "--train-while-serving", "--online-training", '{"share": 0.05}']) == 0
    assert fast.speculation.online.options.share == 0.05


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_answers_keep_their_bits_on_a_gpu(monkeypatch, kind):
    """In 16 bits and with captured rounds, which read the weights that swaps change."""
    # Every comparison is won, because a random head may not learn enough in a few steps.
    monkeypatch.setattr(Updates, "count", lambda *given: torch.tensor([[[9, 4]], [[9, 3]]]))
    model = copy.deepcopy(drafts.target("llama")).bfloat16().cuda()
    steps = {} if kind == "dflash" else {"num_steps": 2}
    head = random_head(kind, model).bfloat16().cuda()
    plain, fast = (speculate(model, kind, draft=head, adaptive=False, max_cache_len=128, **steps) for _ in range(2))
    expected = [ask(plain, seed, seed % 2 == 1) for seed in range(20)]
    before = copy.deepcopy(head.state_dict())
    online, answers = train_while_serving(fast, steps_between_swaps=5, learning_rate=5e-3), []
    for seed in range(20):
        answers.append(ask(fast, seed, seed % 2 == 1))
        online.work()
    assert all(map(torch.equal, answers, expected)) and not online.fault
    assert (online.steps, online.swaps) == (20, 4)
    assert not all(torch.equal(weight, before[name]) for name, weight in head.state_dict().items())
