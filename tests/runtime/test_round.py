"""Rounds over random trees against Hugging Face: verify, accept, commit; then the same rounds compiled."""

import functools
import random

import models
import pytest
import torch
from rows import begin_rows
from sweeps import thinned
from toy_graphs import with_table

from spec_compile.compile.part import counts
from spec_compile.config import Options
from spec_compile.drafting import Algorithm, Drafter, DraftPlan
from spec_compile.runtime.engine import Engine
from spec_compile.runtime.pipeline import Call
from spec_compile.runtime.request import Request, Sequence
from spec_compile.runtime.session import StepKind
from spec_compile.tree import ancestry

NEW = 48
LENGTHS = {1: (24,), 3: (24, 9, 15), 4: (70, 33, 1, 128)}  # prompts of several chunks, and of a single token


class Oracle(Drafter):
    """Random trees with distinct siblings; a share of them follows the text that the target will write.

    What lies in slots that are not in use is what the target would choose, and must not be accepted all the same.
    """

    def __init__(self, nodes, batch, luck=0.8, full=False, seed=0):
        super().__init__()
        self.nodes, self.batch, self.luck, self.full = nodes, batch, luck, full
        self.random = random.Random(seed)
        self.texts = [[]] * batch
        self.proposed = []

    def propose(self, state, max_kv_len):
        trees = [self.tree(text, int(length) + 1) for text, length in zip(self.texts, state.lengths)]
        tokens, parents, count = (torch.tensor(part) for part in zip(*trees))
        tokens[:, 0] = state.tokens.gather(1, state.lengths[:, None])[:, 0]
        self.proposed.append((tokens, parents, count))
        state.propose(tokens, parents, count, torch.ones_like(count))

    def tree(self, text, committed):
        pick, true = self.random, [0]  # nodes that follow the text, by depth
        tokens, parents = [0], [-1]
        count = self.nodes if self.full else pick.choice([1, self.nodes, pick.randint(1, self.nodes)])
        for node in range(1, self.nodes):
            parent = true[-1] if pick.random() < self.luck else pick.randrange(node)
            place = committed + (true.index(parent) if parent in true else 0)
            word = text[place] if place < len(text) else 3
            taken = {tokens[other] for other in range(1, node) if parents[other] == parent}
            if node >= count:
                tokens.append(word)
            elif parent == true[-1] and word not in taken and place < len(text):
                tokens.append(word)
                true.append(node)
            else:
                tokens.append(pick.choice([t for t in range(3, models.VOCAB) if t not in taken and t != word]))
            parents.append(parent)
        return tokens, parents, count


class Replay(Drafter):
    """Proposes recorded trees one after the other, in operations that a compiled round can hold."""

    def __init__(self, trees, rows):
        """rows: as many as trees were recorded of, or, where an example of other sizes is compiled, any number."""
        super().__init__()
        for number, name in enumerate(("tokens", "parents", "count")):
            recorded = torch.stack([tree[number] for tree in trees])
            self.register_buffer(name, recorded[:, torch.arange(rows) % recorded.shape[1]])
        self.register_buffer("turn", torch.zeros(1, dtype=torch.int64))

    def propose(self, state, max_kv_len):
        tokens, parents, count = (t.index_select(0, self.turn)[0] for t in (self.tokens, self.parents, self.count))
        tokens = torch.cat([state.tokens.gather(1, state.lengths[:, None]), tokens[:, 1:]], dim=1)
        state.propose(tokens, parents, count, torch.ones_like(count))
        self.turn.add_(1)


class Given(Algorithm):
    """Drafters made by a function of the batch size."""

    def __init__(self, make, nodes):
        self.make, self.plan = make, DraftPlan(nodes, sizes="tree")

    def drafter(self, batch, slots):
        return self.make(batch)


def make_engine(graph, make_drafter, nodes, compile=False):
    options = Options(num_draft_tokens=nodes, max_cache_len=320, compile=compile)
    engine = Engine(models.ADMITTED["llama"](), "given", graph, Given(make_drafter, nodes), options)
    engine.runtime.cold_start = None  # compile steps when they are made
    return engine


class Run:
    """One request, driven round by round."""

    def __init__(self, engine, prompts, limits=None, eos=(), texts=None):
        self.engine, self.session = engine, engine.session(len(prompts))
        self.state = self.session.state
        if texts is not None:
            self.session.drafter.texts = texts
        limits = limits or [len(prompt) + NEW for prompt in prompts]
        begin_rows(self.state, prompts, limits, eos)
        self.session.drafter.start(self.state, prompts, [])
        for done in range(0, max(map(len, prompts)) - 1, 32):
            self.session.get(StepKind.PREFILL)(32, -(-(done + 32) // 128) * 128)
        self.state.root()
        self.session.drafter.propose(self.state, 128)

    def max_kv_len(self, nodes):
        return -(-(int(self.state.lengths.max()) + nodes) // 128) * 128

    def round(self, nodes):
        return self.session.get(StepKind.ROUND, nodes)(self.max_kv_len(nodes)).clone()


@functools.cache
def truths(name, batch):
    """The prompts, and what the model itself writes after them."""
    model = models.ADMITTED[name]()
    rows, _, _ = models.prompts(LENGTHS[batch])
    prompts = [row[0].tolist() for row in rows]
    return prompts, [prompt + models.greedy(model, row, new=NEW)[0][0].tolist() for prompt, row in zip(prompts, rows)]


def fresh_cache(engine, text):
    """Keys and values [Hkv, T, D] of a text, as one forward of the prefill graph makes them."""
    ids = torch.tensor([text])
    cache = [
        torch.zeros(1, layer.kv_heads, len(text), size)
        for layer in engine.runtime.prefill.layers
        for size in (layer.key_dim, layer.value_dim)
    ]
    steps = torch.arange(len(text))[None]
    engine.runtime.prefill.gm(ids, steps, torch.zeros(1, dtype=torch.int64), None, with_table(cache), len(text))
    return [slots[0] for slots in cache]


def follow(tokens, parents, count, text):
    """Nodes of the tree that `text`, which begins after the root, runs through."""
    path = [0]
    for word in text:
        children = [i for i in range(1, count) if parents[i] == path[-1] and tokens[i] == word]
        if not children:
            break
        path += children
    return path


def check_logits(model, run, nodes):
    """What verification says of each node against the model's own forward over the text and the node's path."""
    state, tree = run.state, run.state.tree(nodes)
    ancestors, depth = ancestry(tree.parents)
    positions = state.positions(depth)
    verify = run.engine.runtime.verify.gm
    got, *_ = verify(tree.tokens, positions, state.lengths, ancestors, state.cache, run.max_kv_len(nodes))
    texts, places = [], []
    for row, length in enumerate(state.lengths.tolist()):
        for node in range(int(state.tree_count[row].clamp(max=nodes))):
            path = [j for j in range(nodes) if int(ancestors[row, node]) >> j & 1]
            texts.append(torch.cat([state.tokens[row, :length], tree.tokens[row, path]]))
            places.append((row, node))
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # what follows a path's end is not seen by it
    own = model(ids, use_cache=False).logits
    for (row, node), text, logits in zip(places, texts, own):
        torch.testing.assert_close(got[row, node], logits[len(text) - 1], rtol=1e-3, atol=1e-3)


GRID = [("llama", nodes, batch) for nodes, batch in ((1, 1), (2, 3), (7, 1), (16, 3), (33, 3), (64, 1))]
GRID += [("gemma2", 7, 3), ("gemma2", 64, 3), ("mistral", 16, 4)]
GRID += [(name, 16, 3) for name in ("gpt2", "gpt_oss", "deepseek_v3", "opt")]
SWEEP = [("llama", nodes, batch) for nodes, batch in ((1, 3), (2, 1), (7, 3), (16, 1), (33, 1), (64, 3), (16, 4))]
SWEEP += [("gemma2", nodes, 3) for nodes in (1, 2, 16, 33)]
SWEEP += [("gemma3", 16, 4), ("mistral", 16, 3), ("phi", 16, 3), ("granite", 16, 3)]
GRID += [pytest.param(*case, marks=pytest.mark.slow) for case in SWEEP]


@pytest.mark.parametrize("name, nodes, batch", GRID)
@torch.no_grad()
def test_rounds_over_random_trees(name, nodes, batch, captured):
    model, graph = captured(name)
    prompts, texts = truths(name, batch)
    engine = make_engine(graph, lambda rows: Oracle(nodes, rows, seed=nodes), nodes)
    run = Run(engine, prompts, texts=texts)
    fresh = [fresh_cache(engine, text) for text in texts]
    longest = rounds = 0
    while not run.state.finished.all():
        rounds += 1
        assert rounds <= NEW, "each round must add a token at least"
        before = run.state.lengths.tolist()
        tree, finished = run.session.drafter.proposed[-1], run.state.finished.tolist()
        if rounds <= 3:
            check_logits(model, run, nodes)
        outcome = run.round(nodes)
        for row, text in enumerate(texts):
            gained, done, count, hint, depth, *rest = outcome[row].tolist()
            tokens, parents, real = (part[row].tolist() for part in tree)
            path = follow(tokens, parents, real, text[before[row] + 1 :])
            want = 0 if finished[row] else min(len(path), len(text) - before[row] - 1)
            longest = max(longest, want)
            length = int(run.state.lengths[row])
            assert gained == want and length == before[row] + want, (rounds, row)
            assert rest[:gained] == text[before[row] + 1 : length + 1], (rounds, row)
            assert rest[nodes : nodes + gained] == path[:gained], (rounds, row)
            assert run.state.tokens[row, : length + 1].tolist() == text[: length + 1], (rounds, row)
            assert bool(done) == (length + 1 == len(text)) == bool(run.state.finished[row])
            assert [count, hint] == [int(run.state.tree_count[row]), 1]
            assert depth == max(len(_climb(parents, node)) - 1 for node in range(real))
            for slots, own in zip(run.state.kv.tensors, fresh[row]):
                torch.testing.assert_close(slots[row, :, :length], own[:, :length], rtol=1e-4, atol=1e-4)
    assert longest >= min(nodes, 6)  # trees were accepted deep into them


def _climb(parents, node):
    return [node, *_climb(parents, parents[node])] if node >= 0 else []


@pytest.mark.parametrize("how", ["limit", "end of sequence"])
@torch.no_grad()
def test_finished_rows_are_left_alone(how, captured):
    """Rows end one after the other; from then on their text, keys and values do not change by a bit."""
    _, graph = captured("llama")
    prompts, texts = truths("llama", 3)
    engine = make_engine(graph, lambda rows: Oracle(16, rows), 16)
    eos = []
    if how == "limit":
        limits = [len(prompt) + new for prompt, new in zip(prompts, (1, 5, 40))]
    else:
        eos = [texts[0][len(prompts[0]) + 4]]
        limits = [len(p) + len(cut(text[len(p) :], eos)) for p, text in zip(prompts, texts)]
        assert len({limit - len(prompt) for limit, prompt in zip(limits, prompts)}) > 1
    run = Run(engine, prompts, limits if how == "limit" else None, eos, texts)
    frozen = {}
    for _ in range(NEW + 5):
        outcome = run.round(16)
        for row, limit in enumerate(limits):
            if row in frozen:
                assert outcome[row, 0] == 0 and outcome[row, 1] == 1
                for now, then in zip(committed(run, row), frozen[row], strict=True):
                    assert torch.equal(now, then)
            elif run.state.finished[row]:
                assert run.state.lengths[row] + 1 == limit
                frozen[row] = [part.clone() for part in committed(run, row)]
    assert len(frozen) == 3
    for row, limit in enumerate(limits):
        assert frozen[row][0].tolist() == texts[row][:limit]


def committed(run, row):
    length = int(run.state.lengths[row])
    return [run.state.tokens[row, : length + 1], *(slots[row, :, :length] for slots in run.state.kv.tensors)]


def call_of(prompts, shortest, longest, eos=(), check=None):
    request = Request(max(longest), eos=list(eos))
    rows = zip(prompts, range(len(prompts)), shortest, longest)
    return Call(request, [Sequence(request, *row) for row in rows], check=check)


def generated(engine, prompts, texts, new, eos=(), least=0):
    """What `Engine.run` yields, row by row, put together."""
    engine.session(len(prompts)).drafter.texts = texts
    shortest, longest = ([len(prompt) + n for prompt in prompts] for n in (least, new))
    rows = [[] for _ in prompts]
    for gained in engine.run(call_of(prompts, shortest, longest, list(eos))):
        for row, tokens in zip(rows, gained):
            row += tokens
    return rows


def cut(tokens, eos):
    """The tokens up to and with the first of `eos`."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in eos), tokens)


@pytest.mark.parametrize("new, nodes", thinned(3, [1, 2, 5, 17, NEW], [1, 4, 16, 64]))
def test_limits_inside_an_accepted_run(new, nodes, captured):
    _, graph = captured("llama")
    prompts, texts = truths("llama", 3)
    engine = make_engine(graph, lambda rows: Oracle(nodes, rows, luck=1.0, full=True), nodes)
    want = [text[len(prompt) :][:new] for prompt, text in zip(prompts, texts)]
    assert generated(engine, prompts, texts, new) == want
    assert engine.runtime.stats.tokens == 3 * new
    assert engine.runtime.stats.rounds == -(-new // nodes)


@pytest.mark.parametrize("place, nodes", thinned(2, [0, 1, 6, 15, 16, 40], [1, 4, 16, 64]))
def test_end_of_sequence_inside_an_accepted_run(place, nodes, captured):
    """The token at a place of the first row ends every row where it first occurs; what is drafted after it is cut."""
    _, graph = captured("llama")
    prompts, texts = truths("llama", 3)
    engine = make_engine(graph, lambda rows: Oracle(nodes, rows, luck=1.0, full=True), nodes)
    answers = [text[len(prompt) :] for prompt, text in zip(prompts, texts)]
    for eos in ([answers[0][place]], [answers[0][place], answers[2][place]]):
        assert generated(engine, prompts, texts, NEW, eos) == [cut(answer, eos) for answer in answers]


@pytest.mark.parametrize("nodes", [1, 4, 16])
@pytest.mark.parametrize("place", ["the last forbidden one", "the first allowed one"])
def test_minimum_length_to_the_token(place, nodes, captured):
    """The model would end at the last place where it may not, or at the first where it may."""
    model, graph = captured("llama")
    prompts, texts = truths("llama", 1)
    answer = texts[0][len(prompts[0]) :]
    least = next(n for n in range(3, NEW) if not {answer[n - 1], answer[n]} & {*answer[: n - 1]})
    eos, other = (answer[least - 1], least - 1) if place == "the last forbidden one" else (answer[least], least + 1)
    ids = torch.tensor(prompts)
    ends = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, eos_token_id=eos)
    want, wrong = (model.generate(ids, min_new_tokens=n, **ends)[0, ids.shape[1] :].tolist() for n in (least, other))
    assert want != wrong
    engine = make_engine(graph, lambda rows: Oracle(nodes, rows, luck=1.0, full=True), nodes)
    assert generated(engine, prompts, texts, NEW, [eos], least) == [want]


@torch.no_grad()
def test_a_request_leaves_nothing_to_the_next(captured):
    """A long request, then a shorter one with other text, limits and ends, in the same session."""
    _, graph = captured("gemma2")
    prompts, texts = truths("gemma2", 3)
    engine = make_engine(graph, lambda rows: Oracle(16, rows), 16)
    first = generated(engine, prompts, texts, NEW)
    eos = [first[0][10]]
    other = generated(engine, prompts[::-1], texts[::-1], 20, eos)
    assert other == [cut(answer[:20], eos) for answer in first[::-1]]
    assert generated(engine, prompts, texts, NEW) == first


# --- compiled


def test_a_model_that_has_changed_gives_no_token_out(captured):
    """A request's check raises when its first round has been launched already; the next request has its answer."""
    _, graph = captured("llama")
    prompts, texts = truths("llama", 3)
    engine = make_engine(graph, lambda rows: Oracle(16, rows), 16)
    engine.session(3).drafter.texts = texts
    lengths = [len(prompt) for prompt in prompts]

    def check():
        raise RuntimeError("the model has changed")

    call = call_of(prompts, lengths, [length + NEW for length in lengths], check=check)
    with pytest.raises(RuntimeError, match="the model has changed"):
        next(engine.run(call))
    assert engine.runtime.stats.rounds == 0
    assert generated(engine, prompts, texts, NEW) == [text[n:] for text, n in zip(texts, lengths)]


def long_prompts(lengths):
    return [row[0].tolist() for row in models.prompts(lengths, seed=5)[0]]


@pytest.fixture(scope="module")
def llama():
    """The model, its graph, and a compiled engine whose drafter replays trees recorded from an eager run."""
    from captures import capture

    model = models.ADMITTED["llama"]()
    graph = capture(model)
    prompts = long_prompts((110, 60))
    texts = [prompt + models.greedy(model, torch.tensor([prompt]), new=64)[0][0].tolist() for prompt in prompts]
    recorder = make_engine(graph, lambda rows: Oracle(4, rows, seed=7), 4)
    run = Run(recorder, prompts, [len(text) for text in texts], texts=texts)
    while not run.state.finished.all():
        run.round(4)
    trees = run.session.drafter.proposed
    trees += trees[-1:] * 100  # rounds over one node need more of them
    return graph, prompts, texts, make_engine(graph, lambda rows: Replay(trees, rows), 4, compile=True), trees


@pytest.mark.sweep("4")
@pytest.mark.parametrize("nodes", [1, 4])
@torch.no_grad()
def test_a_compiled_round_equals_the_eager_one(nodes, llama):
    """Outcome, text, keys and values after each round, while lengths grow across several kv_lens."""
    graph, prompts, texts, compiled, trees = llama
    eager = make_engine(graph, lambda rows: Replay(trees, rows), 4)
    for engine in (compiled, eager):
        engine.session(2).drafter.turn.zero_()
    limits = [len(text) for text in texts]
    fast, slow = Run(compiled, prompts, limits), Run(eager, prompts, limits)
    fast.session.get(StepKind.ROUND, nodes)
    graphs, kv_lens = counts["traced"], set()
    while not slow.state.finished.all():
        kv_lens.add(fast.max_kv_len(nodes))
        assert torch.equal(fast.round(nodes), slow.round(nodes))
        for row in range(2):
            pairs = zip(committed(fast, row), committed(slow, row), strict=True)
            for number, (a, b) in enumerate(pairs):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 if number else 0)
    assert kv_lens == {128, 256}
    assert counts["traced"] == graphs, "something was compiled again"
    assert [committed(fast, row)[0].tolist() for row in range(2)] == texts


def test_prompts_of_all_lengths_share_one_prefill(llama):
    graph, _, _, compiled, trees = llama
    eager = make_engine(graph, lambda rows: Replay(trees, rows), 4)
    compiled.session(2).get(StepKind.PREFILL)
    compiled.session(2).get(StepKind.ROUND, 4)
    compiled.session(2).get(StepKind.ROUND, 1)
    graphs = counts["traced"]
    for lengths in ((1, 1), (2, 1), (5, 31), (32, 33), (34, 64), (65, 97), (128, 129), (130, 161), (200, 3), (9, 200)):
        prompts, answers = long_prompts(lengths), []
        for engine in (compiled, eager):
            session = engine.session(2)
            session.drafter.turn.zero_()
            answers.append(generated(engine, prompts, None, 6))
        assert answers[0] == answers[1], lengths
    assert counts["traced"] == graphs, "something was compiled again"
