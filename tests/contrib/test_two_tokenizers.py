"""Drafts of another tokenizer: the tokens in common, the drafts over them, and answers that are plain decoding's."""

from types import SimpleNamespace

import draft_rounds as rounds
import models
import pytest
import torch
import two_tokenizers as two

from spec_compile import speculate
from spec_compile.contrib.two_tokenizers import common_tokens, contents
from spec_compile.drafters.draft_model import SameTokens

SCHEDULES = {name: rounds.SCHEDULES[name] for name in ("chain", "one", "tree", "union", "chain union")}
SCHEDULES["drawn"] = dict(num_steps=3, draft_sample_method="probabilistic")
SPELLINGS = {
    "bytes": ({"Ġa": 0, "Ċ": 1, "Ã©": 2, "Ã": 3, "a": 4}, [b" a", b"\n", "é".encode(), b"\xc3", b"a"]),
    "SentencePiece": ({"▁a": 0, "<0x0A>": 1, "é": 2, "a▁b": 3}, [b" a", "é".encode(), b"a b", b"\n"]),
    "neither": ({"a": 0, "é": 1}, [b"a", "é".encode()]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_contents_are_bytes(name):
    vocab, expected = SPELLINGS[name]
    tokenizer = two.made(vocab, unk_token="<unk>", additional_special_tokens=["▁Ġ"])
    tokenizer.add_tokens([" b"])
    size = len(vocab)
    ids, found = zip(*contents(tokenizer))
    assert [each for i, each in zip(ids, found) if i < size] == expected
    assert {*found} - {*expected} == {"<unk>", "▁Ġ", b" b"} and len({*ids}) == size + 3


def test_a_mapping_by_hand():
    """ " de" has a counterpart, "define" and "x" do not; the ends of a text have other names."""
    ours = two.made({"</s>": 0, "<s>": 1, "Ġde": 2, "define": 3, "x": 4, "Ċ": 5, "<tool>": 6}, eos_token="</s>",
                    bos_token="<s>", additional_special_tokens=["<tool>"])  # fmt: skip
    theirs = two.made({"<0x0A>": 0, "▁de": 1, "ine": 2, "ne": 3, "<end>": 4, "\n": 5, "?": 6}, eos_token="<end>",
                      bos_token="<end>", unk_token="?")  # fmt: skip
    mapping = common_tokens(ours, theirs, 9, 7)
    assert mapping.columns.tolist() == [1, 4, 5] and mapping.draft_to_target.tolist() == [2, 0, 5]
    assert mapping.read(torch.tensor([*range(9), 30])).tolist() == [4, 4, 1, 2, 6, 5, 6, 6, 6, 6]
    assert mapping.share == 3 / 7 and "3 tokens are in both" in mapping.explain()[0] and "43%" in mapping.explain()[0]
    logits = torch.arange(14.0).view(2, 7)
    assert mapping.logits(logits).tolist() == [[1, 4, 5], [8, 11, 12]]
    assert common_tokens(ours, theirs, 5, 5).columns.tolist() == [1, 4]  # without the rows of the others


def test_equal_tokenizers_map_to_themselves():
    mapping = common_tokens(two.tokenizer(), two.tokenizer(), models.VOCAB, models.VOCAB)
    same, ids = SameTokens(models.VOCAB, models.VOCAB, models.VOCAB), torch.arange(models.VOCAB)
    assert mapping.share == 1 and mapping.read(ids).equal(same.read(ids)) and mapping.draft_to_target.equal(ids)
    logits = torch.randn(3, models.VOCAB)
    assert mapping.logits(logits).equal(same.logits(logits))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_target_with_other_ids_accepts_everything(batch):
    """Also after a text whose beginning has its keys in the caches already."""
    system = two.fast(dict(num_steps=4))
    ids, new = rounds.prompts(batch), 5 * 6
    answer = rounds.generated(system, ids, new)
    assert answer.equal(rounds.generated(rounds.target("llama"), ids, new))
    rounds.generated(system, torch.cat([answer, ids[:, :9]], dim=1), new)
    assert system.speculation.stats.accept_length == 5


@pytest.mark.sweep("chain tree chain-union drawn")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda name: name.replace(" ", "-"))
def test_tokens_are_plain_decodings(schedule):
    system = two.fast(SCHEDULES[schedule], two.LACKING)
    for batch in (1, 4):
        assert rounds.generated(system, rounds.prompts(batch)).equal(rounds.plain("llama", batch))
    stats = system.speculation.stats
    assert 1.1 < stats.accept_length and stats.vocabulary_share == 1 - len(two.LACKING) / models.VOCAB
    stats.reset()
    assert "vocabulary in common with the draft: 80%" in str(stats)
    assert "77 tokens are in both vocabularies, 80% of the model's 96 and 59% of the draft's 130" in (
        system.speculation.explain()
    )


@torch.no_grad()
@pytest.mark.sweep("tree")
@pytest.mark.parametrize("schedule", ["chain", "tree"])
def test_drafts_are_the_likeliest_common_tokens(schedule):
    """A token that the draft lacks is read as its last letter, which the draft has as ids 0 to 9."""
    system, ids = two.fast(SCHEDULES[schedule], two.LACKING), two.draft_ids()
    plan, lacking = system.speculation.engine.runtime.algorithm.schedule, torch.tensor(two.LACKING)
    read = ids.index_copy(0, lacking, torch.tensor([ord(two.word(i)[-1]) - 97 for i in two.LACKING]))

    def in_ids_of_target(text):
        logits = two.draft()(read[text]).logits[..., ids]
        return SimpleNamespace(logits=logits.index_fill(-1, lacking, -torch.inf))

    def look(session, row, text):
        tokens, parents = rounds.drafted("draft_model", in_ids_of_target, None, plan, text)
        assert rounds.tree_of(session, row, tokens.shape[1]) == (tokens[0].tolist(), parents[0].tolist())

    answer, checked = rounds.followed(system, rounds.prompts(1), look)
    assert checked > 8 and {*answer[0].tolist()} & {*two.LACKING}


def test_requests_of_a_batch():
    system = two.fast(SCHEDULES["chain"], two.LACKING)
    prompts = [row[: 9 + 5 * number].tolist() for number, row in enumerate(rounds.prompts(4))]
    config = dict(max_new_tokens=12, do_sample=False, eos_token_id=-1)
    outputs = system.generate_batch(prompts, **config)
    for prompt, output in zip(prompts, outputs.values()):
        want = rounds.generated(rounds.target("llama"), torch.tensor([prompt]), 12)[0, len(prompt) :]
        assert output.generated_tokens == want.tolist()


@pytest.mark.slow
def test_compiled_rounds_draft_the_same():
    rounds.same_when_compiled(
        lambda compile: two.fast(SCHEDULES["one"], two.LACKING, compile=compile), rounds.prompts(1)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rounds_of_a_gpu(schedule):
    on_gpu = two.fast(SCHEDULES[schedule], two.LACKING, device="cuda", compile=True)
    for batch in (1, 4):
        assert rounds.generated(on_gpu, rounds.prompts(batch).cuda()).cpu().equal(rounds.plain("llama", batch))
    assert on_gpu.speculation.stats.accept_length > 1.1


def test_tokenizers_of_the_checkpoints_are_loaded(tmp_path):
    target, smaller = rounds.target("llama"), two.draft()
    smaller.save_pretrained(tmp_path / "draft")
    two.draft_tokenizer().save_pretrained(tmp_path / "draft")
    two.tokenizer().save_pretrained(tmp_path / "target")
    options = dict(compile=False, check=False, max_cache_len=200)
    system = models.speculate_captured(
        target, "draft_model", draft=str(tmp_path / "draft"), tokenizer=tmp_path / "target", **options
    )
    assert system.speculation.stats.vocabulary_share == 1
    (tmp_path / "draft" / "tokenizer.json").unlink()
    (tmp_path / "draft" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"assistant_tokenizer: .*draft has no tokenizer of LlamaForCausalLM"):
        speculate(target, "draft_model", draft=str(tmp_path / "draft"), tokenizer=two.tokenizer(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(), r"vocabulary of 130 tokens is not the model's \(96\).*use_heterogeneous_vocab=True"),
        (dict(use_heterogeneous_vocab=True), r"tokenizer: LlamaForCausalLM is not from a checkpoint .*pass tokenizer="),
        (dict(tokenizer=two.tokenizer()), r"assistant_tokenizer: .* pass assistant_tokenizer="),
        (dict(tokenizer=3), "tokenizer: expected a tokenizer of transformers, a folder or a name on the hub, got int"),
        (
            dict(tokenizer=two.tokenizer(), assistant_tokenizer=two.made({"other": 0})),
            r"draft: 0% of the model's vocabulary, 0 of 96 tokens, are also the draft's; expected 1 or more",
        ),
        (
            dict(tokenizer=two.tokenizer(), assistant_tokenizer=two.made({"ag": 0}), topk=2),
            "1 of 96 tokens.* 2 or more",
        ),
    ],
)
def test_refusals(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        speculate(rounds.target("llama"), "draft_model", draft=two.draft(), compile=False, **options)
