"""Thinking budgets: the end comes exactly after the budget, and drafts change no token."""

from pathlib import Path

import fake_xgrammar as fake
import pytest
import torch
from batch_requests import collect, running
from grammar_cases import EOS, NEW, TABLE, VOCAB, accepted
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

import spec_compile
from spec_compile import ThinkingBudget, speculate
from spec_compile.runtime.answer import Answer
from spec_compile.runtime.verify import Route, make_acceptor
from spec_compile.runtime.verify.host import ConstrainedAcceptor, HostAcceptor
from spec_compile.runtime.verify.thinking import ThinkingMarks, ThinkingPlace, check_processors, find_marks
from spec_compile.tree import Tree

DEMO = Path(__file__).parents[2] / "examples" / "tiny_coder"
THINKING = "# a task\n<think>\n"
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 1.3, "top_k": 50}
WARPERS = [TemperatureLogitsWarper(1.3), TopKLogitsWarper(20)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO, padding_side="left")


@pytest.fixture(scope="module")
def plain():
    config = AutoConfig.from_pretrained(DEMO, num_hidden_layers=2)
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, config=config).eval()


@pytest.fixture(scope="module")
def fast(plain):
    return speculate(plain, compile=False, check=False, num_draft_tokens=8, adaptive=False)


def tags(tokenizer, budget, end="</think>", **options):
    return ThinkingBudget(tokenizer, budget, start="<think>", end=end, **options)


def answer(model, tokenizer, prompts, processors, seed=0, **options):
    """New tokens of each row [B, W]."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    options = dict(max_new_tokens=24, eos_token_id=-1, pad_token_id=0) | options
    output = model.generate(**inputs, logits_processor=processors, **options)
    return output[:, inputs["input_ids"].shape[1] :]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("end", ["</think>", "]"], ids=["several tokens", "one token"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_comes_exactly_after_the_budget(fast, plain, tokenizer, budget, sampling, end):
    """Before it and after it the tokens are those of a model that nobody forces."""
    start, ids = "<think>\n", tokenizer(end, add_special_tokens=False)["input_ids"]
    assert (len(ids) > 1) is (end == "</think>")
    limit = ThinkingBudget(tokenizer, budget, start=start, end=end)
    free = answer(fast, tokenizer, [THINKING], [], **sampling)[0].tolist()
    got = answer(fast, tokenizer, [THINKING], [limit], **sampling)[0].tolist()
    assert end not in tokenizer.decode(free) and got[: budget + len(ids)] == free[:budget] + ids
    assert got != free[:budget] + ids + free[budget + len(ids) :]
    begun = THINKING + tokenizer.decode(got[: budget + len(ids)])
    if sampling is GREEDY:
        rest = answer(fast, tokenizer, [begun], [], max_new_tokens=24 - budget - len(ids), **GREEDY)
        assert got[budget + len(ids) :] == rest[0].tolist()
        assert got == answer(plain, tokenizer, [THINKING], [limit], **GREEDY)[0].tolist()
    undrafted = answer(fast, tokenizer, [THINKING], [limit], speculation=False, **sampling)[0].tolist()
    assert got == undrafted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("own", [False, True], ids=["rows apart", "rows in lockstep"])
def test_rows_of_a_batch(fast, plain, tokenizer, sampling, own):
    """A row that thinks from the prompt on, one that has thought, one that does not think."""
    prompts = [THINKING, "<think>\na b c</think>\nx = [1, 1, 1, 1,", "x = [1, 1, 1, 1, 1,"]
    processors = lambda: [tags(tokenizer, 5), *([lambda ids, scores: scores] if own else [])]  # noqa: E731
    free = answer(fast, tokenizer, prompts, [], **sampling)
    got = answer(fast, tokenizer, prompts, processors(), **sampling)
    used = answer(fast, tokenizer, prompts, processors(), speculation=False, **sampling)
    assert torch.equal(got, used) and torch.equal(got[1:], free[1:])
    end = tokenizer("</think>", add_special_tokens=False)["input_ids"]
    spent = len(tokenizer("\n", add_special_tokens=False)["input_ids"])
    assert got[0, : 5 - spent].equal(free[0, : 5 - spent]) and got[0, 5 - spent :][: len(end)].tolist() == end
    if sampling is GREEDY:
        assert torch.equal(got, answer(plain, tokenizer, prompts, processors(), **GREEDY))


def test_requests_with_and_without_budgets(fast, tokenizer):
    ids, spent, end = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (THINKING, "\n", "</think>"))
    options = dict(max_new_tokens=24, eos_token_id=-1, do_sample=True, temperature=1.3, seed=3)
    with running(fast) as manager:
        names = {None: manager.add_request(ids, **options)}
        for budget in (2, 5, 9):
            names[budget] = manager.add_request(ids, **options, logits_processor=[tags(tokenizer, budget)])
        pair = manager.add_request(ids, **options, num_return_sequences=2, logits_processor=[tags(tokenizer, 4)])
        outputs = {name: output.generated_tokens for name, output in collect(manager, 6).items()}
    for name, budget in [*((names[budget], budget) for budget in (2, 5, 9)), (pair, 4)]:
        count = budget - len(spent)
        assert outputs[name][count : count + len(end)] == end
        assert name == pair or outputs[name][:count] == outputs[names[None]][:count]
    own = answer(fast, tokenizer, [THINKING], [tags(tokenizer, 5)], 3, do_sample=True, temperature=1.3)
    assert own[0].tolist() == outputs[names[5]]


class Letters:
    """A tokenizer of one letter a token: "a" is 3, and so on to 28; 29 is "<", 30 is ">"; 31 is "b>"."""

    texts = ["", "", "", *map(chr, range(97, 123)), "<", ">", "b>"]

    def __len__(self):
        return len(self.texts)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [self.texts.index(letter) for letter in text]}

    def decode(self, ids):
        return "".join(self.texts[token] for token in ids)


A, B, C, LEFT, RIGHT, MERGED = 3, 4, 5, 29, 30, 31


def stepped(tokens, start="<a", end="ab>"):
    marks, place = ThinkingMarks(Letters(), start, end), ThinkingPlace()
    for token in tokens:
        place = place.after(token, marks)
    return place, marks


@pytest.mark.parametrize(
    ("tokens", "thinks", "count", "forced"),
    [
        ([C, C], False, 0, None), ([LEFT], False, 0, None), ([LEFT, A], True, 0, None), ([LEFT, A, C], True, 1, None),
        ([LEFT, A, C, C], True, 2, A), ([LEFT, A, C, A], True, 2, B), ([LEFT, A, A, B], True, 2, RIGHT),
        ([LEFT, A, A, B, A], True, 3, B), ([LEFT, A, A, B, RIGHT], False, 0, None),
        ([LEFT, A, A, MERGED], False, 0, None),
        ([LEFT, A, A, B, RIGHT, LEFT, A, C], True, 1, None), ([LEFT, A, LEFT, A], True, 2, B),
    ],
)  # fmt: skip
def test_places_and_forced_tokens(tokens, thinks, count, forced):
    place, marks = stepped(tokens)
    assert (place.thinks, place.count, place.forced(marks, 2)) == (thinks, count, forced)


def stretches(tokens):
    """Tokens of each stretch of thinking that ends, its end "ab>" included."""
    place, marks = stepped([], "<")
    for token in tokens:
        before, place = place, place.after(token, marks)
        if before.thinks and not place.thinks:
            yield before.count + 1


@pytest.mark.parametrize("seed", [None, 11], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", [ConstrainedAcceptor.__call__, ConstrainedAcceptor.accept])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_any_drafts_give_the_same_tokens(budget, seed, way, monkeypatch):
    """Over a table of logits, with trees of right and wrong drafts; also the way of a GPU."""
    monkeypatch.setattr(ConstrainedAcceptor, "__call__", way)

    def budgets():
        made = [ThinkingBudget(Letters(), budget, start="<", end="ab>")]
        check_processors(made, 1, VOCAB)
        return [*made, *(WARPERS if seed else [])]

    table = TABLE.clone()
    table[:, LEFT] += 3
    monkeypatch.setattr("grammar_cases.TABLE", table)
    first = accepted(budgets(), 3, torch.ones(3, NEW + 1, dtype=torch.int64), seed, ends=False)[0]
    for number in range(3):
        g = torch.Generator().manual_seed(number)
        result, most, accept = accepted(budgets(), 3, first, seed, g, ends=False)
        assert torch.equal(result, first) and most > 2
        assert type(accept) is ConstrainedAcceptor
    if seed is None:
        texts, processors = torch.ones(3, 1, dtype=torch.int64), LogitsProcessorList(budgets())
        for _ in range(NEW):
            texts = torch.cat([texts, processors(texts, table[texts[:, -1]]).argmax(dim=1)[:, None]], dim=1)
        assert torch.equal(first, texts)
    counts = [count for row in first.tolist() for count in stretches(row)]
    assert max(counts) == budget + 3  # with the three tokens of the end


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("prompt", ["none", "in the prompt", "by itself"])
def test_a_grammar_begins_after_the_thinking(prompt, lockstep, monkeypatch):
    fake.install(monkeypatch)
    grammar = fake.grammar(VOCAB, seed=1, final={3, 7})
    table = TABLE.clone()
    table[:, LEFT] += 20 if prompt == "by itself" else -20
    monkeypatch.setattr("grammar_cases.TABLE", table)
    prefix = [LEFT, C] if prompt == "in the prompt" else [1]
    made = ThinkingBudget(Letters(), 3, start="<", end="ab>", then=fake.Processor(grammar))
    check_processors([made], 1, VOCAB)
    answer = Answer(torch.tensor([prefix]), NEW + len(prefix), [EOS], 0)
    processors = LogitsProcessorList([made, *([lambda ids, scores: scores] if lockstep else [])])
    accept = make_acceptor(Route.ON_HOST, answer, processors, None)
    assert type(accept) is (HostAcceptor if lockstep else ConstrainedAcceptor)
    while not answer.done:
        root = torch.tensor([[(answer.rows[0] or prefix)[-1]]])
        accept(Tree(root, torch.tensor([[-1]]), torch.ones(1, 1, dtype=torch.bool)), table[root])
    tokens = answer.rows[0]
    if prompt == "by itself":
        assert tokens[0] == LEFT
        tokens = tokens[1:]
    if prompt != "none":
        thought = 2 if prompt == "in the prompt" else 3
        assert tokens[thought : thought + 3] == [A, B, RIGHT] and len(tokens) > 6
        tokens = tokens[thought + 3 :]
    matcher = fake.GrammarMatcher(grammar)
    for token in tokens:
        assert matcher.is_terminated() or matcher.accept_token(token)
    with pytest.raises(ValueError, match="make a new one"):
        check_processors([made], 1, VOCAB)


def test_marks_are_found(tokenizer):
    with pytest.raises(ValueError, match=r"no thinking.*response_template.*<think> ... </think>"):
        find_marks(tokenizer)
    other = AutoTokenizer.from_pretrained(DEMO)
    other.chat_template = "{% if thinks %}[THINK]a[/THINK]{% endif %}"
    assert find_marks(other) == ("[THINK]", "[/THINK]")
    other.add_tokens(["<think>", "</think>"], special_tokens=True)
    assert find_marks(other) == ("<think>", "</think>")
    other.response_template = {"fields": {"thinking": {"open": "<a>", "close": ["</a>", "</b>"]}}}
    assert find_marks(other) == ("<a>", "</a>")
    assert spec_compile.ThinkingBudget(other, 3).marks.end == "</a>"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": -1}, ValueError, "budget"), ({"budget": 1.5}, TypeError, "budget"),
        ({"budget": True}, TypeError, "budget"), ({"end": None}, ValueError, "start, end: expected both"),
        ({"end": ""}, ValueError, "end: expected a text"), ({"start": " "}, ValueError, "start: expected a text"),
        ({"then": 3}, TypeError, "then: expected"),
    ],
)  # fmt: skip
def test_wrong_arguments(tokenizer, arguments, error, words):
    with pytest.raises(error, match=words):
        ThinkingBudget(tokenizer, **{"budget": 1, "start": "<think>", "end": "</think>"} | arguments)


def test_marks_that_the_model_lacks(fast):
    other = AutoTokenizer.from_pretrained(DEMO)
    other.add_tokens(["<think>", "</think>"])
    with pytest.raises(ValueError, match="tokens that the model does not have"):
        answer(fast, other, ["a"], [ThinkingBudget(other, 3)])
