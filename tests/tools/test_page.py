"""Recordings against what rounds were given and what generate() answered; the page against its recording."""

import functools
import json
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sweeps import thinned

from spec_compile import speculate
from spec_compile.outcome import Outcome, RecordedRound, Recording
from spec_compile.tools import page as report

NEW = 30
PAGE_IN_NODE = Path(__file__).parents[1] / "support" / "page_in_node.js"
ALGORITHMS = {
    "ngram": dict(algo="ngram"),
    "chain": dict(algo="draft_model", num_steps=3),
    "tree": dict(algo="draft_model", num_steps=3, topk=3, num_draft_tokens=8),
}
CALLS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.7),
    "processed": dict(do_sample=False, repetition_penalty=1.2, no_repeat_ngram_size=4),
    "ending": dict(do_sample=False, eos_token_id=list(range(40, 50))),
}


def verified(tokens, parents, path, gained):
    return Outcome(gained, False, 0, 0, 0, path, tokens, parents)


def fresh(kind="ngram"):
    options = dict(ALGORITHMS[kind])
    if options["algo"] == "draft_model":
        draft = models.ADMITTED["llama"]()
        with torch.no_grad():
            draft.lm_head.weight += 0.01 * torch.randn(draft.lm_head.weight.shape, generator=seeded(1))
        options["draft"] = draft
    return speculate(models.ADMITTED["llama"](), compile=False, adaptive=False, max_cache_len=200, **options)


fast = functools.cache(fresh)


def seeded(number):
    return torch.Generator().manual_seed(number)


def ask(system, batch=1, **options):
    ids = torch.randint(3, models.VOCAB, (batch, 19), generator=seeded(batch))
    mask = (torch.arange(19) >= torch.tensor([0, 7, 12])[:batch, None]).long()
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW) | options
    torch.manual_seed(5)
    return ids, mask, system.generate(ids, attention_mask=mask, **options)


def recorded(system, batch=1, **options):
    """The recording, each row's new tokens in the answer, and the trees that lay ready after each round."""
    engine, ready = system.speculation.engine, []
    run = engine.run
    state = engine.session(batch).state

    def pending():
        trees = zip(state.tree_tokens.tolist(), state.tree_parents.tolist(), state.tree_count.tolist())
        return [(tokens[:count], parents[:count]) for tokens, parents, count in trees]

    def watched(request):
        for gained in run(request):
            ready.append(pending())
            yield gained

    engine.run = watched
    try:
        with system.speculation.recording():
            ids, mask, answer = ask(system, batch, **options)
    finally:
        del engine.run
    prompts = [row[pad.bool()].tolist() for row, pad in zip(ids, mask)]
    assert engine.recording.prompts == prompts
    return engine.recording, answer[:, ids.shape[1] :].tolist(), ready


def children(tree, node):
    return {tree.tokens[i]: i for i, parent in enumerate(tree.parents) if parent == node}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind, call, batch", thinned(2, [*ALGORITHMS], [*CALLS], [1, 3]))
def test_trees_and_paths_write_the_answer(kind, batch, call):
    ask(fast(kind), batch, **CALLS[call])  # n-grams know the answer from here on
    recording, answer, ready = recorded(fast(kind), batch, **CALLS[call])
    accepted = 0
    for row, prompt in enumerate(recording.prompts):
        text, over = list(prompt), False
        for number, one in enumerate(recording.rounds):
            part = one.rows[row]
            if part is None:
                over = True
                continue
            assert not over and part.gained and len(part.tokens) <= one.nodes
            if number:
                tokens, parents = ready[number - 1][row]
                assert (part.tokens, part.parents) == (tokens[: one.nodes], parents[: one.nodes])
            assert part.tokens[0] == text[-1] and part.parents[0] == -1
            assert part.path[0] == 0 and len(part.path) == len(part.gained)
            for above, node, token in zip(part.path, part.path[1:], part.gained):
                assert children(part, above)[token] == node
            accepted += len(part.path) - 1
            text += part.gained
        output = text[len(prompt) :]
        assert output == recording.output(row)
        assert answer[row] == output + [0] * (len(answer[row]) - len(output))
    assert accepted > 0


def test_a_rejected_token_is_not_what_was_chosen():
    """Greedy and alone, a path ends where no child has the token that follows, but for the end of the answer."""
    recording, _, _ = recorded(fast("tree"))
    rejected = 0
    for one in recording.rounds[:-1]:
        (part,) = one.rows
        assert part.gained[-1] not in children(part, part.path[-1])
        rejected += len(part.tokens) > len(part.path)
    assert rejected


def test_counts_and_times_are_those_of_the_call():
    system = fast("tree")
    for _ in range(2):  # the second time, of the second call alone
        before = dict(system.speculation.stats.seconds)
        recording, _, _ = recorded(system, 3)
        stats = system.speculation.stats
        assert recording.seconds == {name: stats.seconds[name] - before[name] for name in before}
        gained = [[len(part.gained) if part else 0 for part in one.rows] for one in recording.rounds]
        assert gained == stats.trace
        assert 0 < sum(one.seconds for one in recording.rounds)
        assert sum(one.seconds for one in recording.rounds) == pytest.approx(
            recording.seconds["verify"] + recording.seconds["draft"]
        )


def test_nothing_is_kept_unless_asked_for(tmp_path):
    system = fresh()
    want = ask(system)[2]
    assert system.speculation.engine.recording is None
    with pytest.raises(RuntimeError, match=r"with .*speculation\.recording\(\)"):
        system.speculation.report(tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
    with system.speculation.recording():
        assert torch.equal(ask(system)[2], want)
    kept = system.speculation.engine.recording
    rounds = len(kept.rounds)
    ask(system, 3)
    assert system.speculation.engine.recording is kept and len(kept.rounds) == rounds
    with pytest.raises(KeyError), system.speculation.recording():
        raise KeyError
    ask(system, 3)
    assert system.speculation.engine.recording is kept


# --- the page


class Page(HTMLParser):
    """What a browser makes of the file: tags that are open, ids seen, the contents of scripts, and addresses."""

    VOID = {"meta", "link", "input", "br"}

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.scripts, self.tags, self.sources = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs.get("id")))
        self.sources += [attrs[name] for name in ("src", "href", "action") if name in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append([attrs.get("id"), ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1][1] += data

    @property
    def data(self):
        (data,) = [content for name, content in self.scripts if name == "data"]
        return json.loads(data)


def page(path):
    made = Page(Path(path).read_text(encoding="utf-8"))
    assert made.open == [] and len(made.scripts) == 2
    return made


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8 and, from 256 on, words; like some, it drops a first space."""

    def __init__(self, *words):
        self.words = words

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=True):
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        parts = [bytes([i]) if i < 256 else self.words[i - 256].encode("utf-8", "surrogatepass") for i in ids]
        return b"".join(parts).decode("utf-8", "replace").removeprefix(" ")


@pytest.mark.parametrize("batch", [1, 3])
def test_the_page_holds_its_recording(batch, tmp_path):
    system = fast("tree")
    recording, _, _ = recorded(system, batch)
    path = system.speculation.report(tmp_path / "page.html", Bytes())
    made = page(path)
    assert path == tmp_path / "page.html" and path.stat().st_size < 60_000
    data = made.data
    assert data["recording"] == asdict(recording)
    assert (data["model"], data["algorithm"]) == ("LlamaForCausalLM", "draft_model")
    for row, prompt in enumerate(recording.prompts):
        assert data["texts"]["prompts"][row] == bytes(prompt).decode().removeprefix(" ")
        assert "".join(data["texts"]["pieces"][row]) == bytes(recording.output(row)).decode()
    assert all(source.startswith("data:") for source in made.sources)
    template = report.TEMPLATE.read_text(encoding="utf-8")
    assert "http" not in template.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in template and "prefers-color-scheme: dark" in template


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_draws_what_each_round_chose(tmp_path):
    """Two plain steps, 16 nodes of which three are accepted besides the root, and 4 of which none is."""
    plain, none = verified([5], [-1], [0], [6]), verified([5, 7, 8, 9], [-1, 0, 0, 0], [0], [6])
    whole = verified([5] * 16, [*range(-1, 15)], [0, 1, 2, 3], [5, 5, 5, 6])
    sizes = [1, 16, 1, 4]
    rounds = [RecordedRound(nodes, 0.001, [part]) for nodes, part in zip(sizes, (plain, whole, plain, none))]
    path = report.write(Recording([[5]], rounds, {"verify": 0.004}), tmp_path / "page.html")
    command = ["node", PAGE_IN_NODE, path, "choices", "sizes", "chosen", "figures", "lengths"]
    drawn = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    bars = [each for each in drawn["choices"]["inside"] if "size" in each.get("class", "").split()]
    taken = [each for each in drawn["choices"]["inside"] if each.get("class") == "taken"]
    assert ["plain" in each["class"] for each in bars] == [True, False, True, False]
    unit = float(bars[0]["height"])
    assert [float(each["height"]) / unit for each in bars] == pytest.approx(sizes)
    assert [float(each["height"]) / unit for each in taken] == pytest.approx([4, 1])
    assert [each["x"] for each in taken] == [bars[1]["x"], bars[3]["x"]]
    assert [("on" in each["class"].split()) for each in bars] == [False, True, False, False]  # it gained most
    text = "2 plain steps, 1 round of 4 nodes, 1 round of 16 nodes: 50% of the rounds drafted, 5.5 nodes a round."
    assert drawn["chosen"]["text"] == text
    assert [each["class"] for each in drawn["sizes"]["inside"] if each["tag"] == "i"] == ["plain", "size", "taken"]
    assert "rounds that drafted50%" in drawn["figures"]["text"]
    gained = [float(each["height"]) for each in drawn["lengths"]["inside"] if "bar" in each.get("class", "").split()]
    assert [each / gained[0] for each in gained] == pytest.approx([1, 4, 1, 1])


def test_without_a_tokenizer_there_are_ids(tmp_path):
    recorded(fast("ngram"))
    assert page(fast("ngram").speculation.report(str(tmp_path / "page.html"))).data["texts"] is None
    with pytest.raises(TypeError, match=r"tokenizer: .*str"):
        fast("ngram").speculation.report(tmp_path / "other.html", "llama")
    assert not (tmp_path / "other.html").exists()


HOSTILE = ["</script>", "<!--", "<script>", "{{data}}", "\u2028", "\x00", '"\\', "]]>", "&lt;", "\ud800", "</SCRIPT >"]


@pytest.mark.slow
@given(words=st.lists(st.sampled_from(HOSTILE) | st.text(min_size=1, max_size=8), min_size=1, max_size=9))
def test_no_token_breaks_the_page(words, tmp_path_factory):
    tokens = [256 + number for number in range(len(words))]
    tree = verified([tokens[0], *tokens], [-1] + [0] * len(tokens), [0], tokens)
    recording = Recording([tokens], [RecordedRound(16, 0.001, [tree])], {"verify": 0.001})
    path = tmp_path_factory.mktemp("hostile") / "page.html"
    tokenizers = None, Bytes(*words)
    plain, made = (page(report.write(recording, path, tokenizer, "</title><b>", "<i>")) for tokenizer in tokenizers)
    tags = [tag for tag, _ in made.tags]
    assert tags == [tag for tag, _ in plain.tags] and "b" not in tags
    assert made.data["recording"] == asdict(recording) == plain.data["recording"]
    assert made.data["model"] == "</title><b>"
    shown = Bytes(*words).decode(tokens * 2, False, False)
    assert made.data["texts"]["prompts"][0] + "".join(made.data["texts"]["pieces"][0]) == shown


@given(prompt=st.text(min_size=1, max_size=6), text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_join_to_the_text_whatever_tokens_cut(prompt, text):
    """With a token for every byte, each character is shown at its last byte."""
    before, output = (list(part.encode("utf-8", "replace")) for part in (prompt, text))
    decode = functools.partial(Bytes().decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    pieces = report._pieces(decode, before, output)
    assert len(pieces) == len(output)
    assert "".join(pieces) == text
    place = 0
    for character in text:
        place += len(character.encode())
        assert pieces[place - 1] == character


def test_words_keep_the_space_that_a_first_word_loses():
    recording = Recording([[65]], [RecordedRound(2, 0.0, [verified([65, 256], [-1, 0], [0, 1], [256, 257])])])
    texts = report._texts(recording, Bytes(" in", "side"))
    assert texts == {"prompts": ["A"], "pieces": [[" in", "side"]], "words": {65: "A", 256: " in", 257: "side"}}
