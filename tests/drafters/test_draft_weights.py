"""The option `draft_weights`: copies of a draft's matrices in fewer bits."""

import copy
import dataclasses

import assistants
import draft_checkpoints as drafts
import draft_rounds as rounds
import pytest
import quantised_drafts as quantised
import torch
from torch import nn

from spec_compile import speculate
from spec_compile.compile.key import artefact_key
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.heads import HeadAlgorithm, HeadOptions
from spec_compile.drafters.options import DraftOptions
from spec_compile.drafters.shared_draft import DraftWeights, parse_formats
from spec_compile.graph import calls
from spec_compile.kernels.linear import PRODUCT, QUANTISED, cpu_gemm, skinny_gemm
from spec_compile.quantised.rounded import FORMATS

OPTIONS = dict(compile=False, check=False, adaptive=False, max_cache_len=200)
TREE = dict(num_steps=3, topk=2, num_draft_tokens=6)
IDS = rounds.prompts(1)


def rounded(weight, name):
    """A weight as its copy has it; as it is if no group of inputs divides it."""
    packed = FORMATS[name](weight.detach())
    return weight if packed is None else nn.Parameter(packed.weight().to(weight.dtype), requires_grad=False)


def twin_of(draft, name, parts=("layers", "output")):
    """A draft whose own matrices are rounded numbers."""
    twin = copy.deepcopy(draft, {id(draft.embedding): draft.embedding})
    for path, part in twin.named_modules():
        if isinstance(part, nn.Linear) and "layers" in parts and path.startswith(("fc", "block")):
            part.weight = rounded(part.weight, name)
    if "output" in parts:
        twin.head_weight = rounded(draft.head_weight, name)
    return twin


def trees(system, target, ids=IDS):
    """The drafts of every round of an answer, which must be the target's own."""
    session, found = system.speculation.engine.session(1), []
    drafter, state = session.drafter, session.state
    propose = drafter.propose

    def proposed(*arguments):
        propose(*arguments)
        found.append(state.tree_tokens.tolist())

    drafter.propose = proposed
    assert torch.equal(rounds.generated(system, ids), rounds.generated(target, ids))
    return found


def same_drafts(target, algorithm, draft, name, parts=("layers", "output"), **options):
    """Assert that copies draft as rounded weights do, and that they change the target no more than the draft."""
    option = name if len(parts) == 2 else dict.fromkeys(parts, name)
    before = {key: value.clone() for key, value in (target.state_dict() | draft.state_dict()).items()}
    system = speculate(target, algorithm, draft=draft, draft_weights=option, **OPTIONS | options)
    found = trees(system, target)
    meant = trees(speculate(target, algorithm, draft=twin_of(draft, name, parts), **OPTIONS | options), target)
    assert found == meant and len(found) > 3
    after = target.state_dict() | draft.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    return system


@pytest.mark.sweep("eagle3-fp8 eagle-int4 mtp-int8")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "mtp"])
def test_heads_draft_as_heads_of_rounded_weights(algorithm, name):
    same_drafts(rounds.target("llama"), algorithm, rounds.head(algorithm, "llama"), name, **TREE)


@pytest.mark.parametrize("part", ["layers", "output"])
def test_one_part(part, monkeypatch):
    monkeypatch.setattr(cpu_gemm, "BEST", 0)  # as on a CPU without a kernel
    target, head = rounds.target("llama"), rounds.head("eagle", "llama")
    system = same_drafts(target, "eagle", head, "int4", (part,), **TREE)
    told = "output matrix int4, 0.0 MB of copies" if part == "output" else "layers int4, "
    told, other = (told, "layers int4") if part == "output" else (told, "output matrix int4")
    text = system.speculation.explain()
    assert told in text and other not in text and "no kernel reads these copies here" in text


@pytest.mark.sweep("dflash-int4")
@pytest.mark.parametrize("flavour, name", [("dflash", "int4"), ("dflash", "fp8"), ("domino", "int8")])
def test_blocks_draft_as_those_of_rounded_weights(flavour, name, tmp_path):
    written = drafts.write(flavour, tmp_path)
    draft = load_head(tmp_path, written.target, "dflash")
    same_drafts(written.target, "dflash", draft, name)


def test_p_eagle_drafts_as_one_of_rounded_weights(tmp_path):
    written = drafts.write("p_eagle", tmp_path)
    same_drafts(written.target, "p_eagle", load_head(tmp_path, written.target, "p_eagle"), "fp8", num_steps=3)


@pytest.mark.sweep("draft_model-int8")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("algorithm", ["draft_model"])
def test_a_draft_model_drafts_as_one_of_rounded_weights(algorithm, name):
    same_drafts_of_models(algorithm, rounds.target("llama"), rounds.draft_model("llama"), name)


def same_drafts_of_models(algorithm, target, draft, name):
    """`same_drafts` of a draft that is a model of transformers."""
    twin = copy.deepcopy(draft)
    for part in twin.modules():
        if isinstance(part, nn.Linear):
            part.weight = rounded(part.weight, name)
    systems = [
        speculate(target, algorithm, draft=each, num_steps=3, **OPTIONS, **given)
        for each, given in ((draft, dict(draft_weights=name)), (twin, {}))
    ]
    ids = IDS[:, :1]  # a draft model reads prompts with its own weights
    assert trees(systems[0], target, ids) == trees(systems[1], target, ids)
    assert f"output matrix {name}" in systems[0].speculation.explain()


@pytest.mark.slow
def test_an_assistant_drafts_as_one_of_rounded_weights():
    same_drafts_of_models("assistant", assistants.target("31B"), assistants.assistant("31B"), "int8")


@torch.no_grad()
def test_refresh_rounds_new_weights():
    target, head = copy.deepcopy(rounds.target("llama")), rounds.head("eagle3", "llama")
    head = copy.deepcopy(head, {id(head.embedding): target.get_input_embeddings().weight,
                                id(head.head_weight): target.get_output_embeddings().weight})  # fmt: skip
    system = speculate(target, "eagle3", draft=head, draft_weights="int8", **TREE, **OPTIONS)
    trees(system, target)
    head.blocks[0].mlp.up_proj.weight *= 1.5
    head.fc.weight *= 0.5
    target.get_output_embeddings().weight[::2] *= 1.25
    system.speculation.refresh()
    twin = speculate(target, "eagle3", draft=twin_of(head, "int8"), **TREE, **OPTIONS)
    assert trees(system, target) == trees(twin, target)


@pytest.fixture
def with_kernels(monkeypatch):
    """The choices of a GPU; products then compute their plain meaning."""
    monkeypatch.setattr(skinny_gemm, "lack_of_device", lambda device: None)


def algorithm_of(head, **options):
    return HeadAlgorithm(head.to(torch.bfloat16), HeadOptions(draft=head, cache=False, **options))


def products(algorithm):
    return [node.kwargs.get("kind", "") for node in calls(algorithm.graph.gm, PRODUCT)]


def test_products_take_the_kernel_for_few_rows(with_kernels):
    head = copy.deepcopy(rounds.head("eagle3", "llama"))
    algorithm = algorithm_of(head, draft_weights={"layers": "int4", "output": "fp8"})
    # q, k and v, and gate and up, are merged; down has 96 inputs, whose groups are of 32.
    assert sorted(products(algorithm)) == [*["Nibbles 256 0 1"] * 3, "Nibbles 32 0 1"]
    assert not calls(algorithm.graph.gm, QUANTISED)
    assert algorithm.logits.copy.kind == "Float8Weight" and algorithm.head.fc.kind == "Nibbles 64 0 1"
    text = "\n".join(algorithm.explain())
    assert "no kernel reads" not in text and "output matrix fp8" in text


def test_published_matrices_are_read_as_they_are_stored(with_kernels, tmp_path):
    target = quantised.write("nf4", "eagle3", tmp_path).target.to(torch.bfloat16)
    head = load_head(tmp_path / "quantised", target, "eagle3")
    algorithm = HeadAlgorithm(head, HeadOptions(draft=head, cache=False))
    assert algorithm.logits.copy.kind.startswith("TableNibbles 256 ")  # one group of 64 inputs
    assert any("layers as published" in line for line in algorithm.explain())
    weights = DraftWeights(None, head, head.head_weight)
    packed = weights.copy_of(head.head_weight, "output")
    assert torch.equal(packed.weight().bfloat16(), head.head_weight)


def test_artefacts_depend_on_it():
    target, head = rounds.target("llama"), rounds.head("eagle", "llama")
    keys = {artefact_key((target, head), HeadOptions(draft_weights=each), "eagle") for each in (None, "fp8", "int4")}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("fp4", ValueError, r"draft_weights: expected one of fp8, int8, int4, or a dict .*got 'fp4'. Did you mean"),
        ({"lm_head": "fp8"}, ValueError, "draft_weights: .*layers and output, got 'lm_head'"),
        ({"layers": None}, ValueError, "draft_weights: .* got None"),
        (8, TypeError, "draft_weights: expected one of .*, got int"),
    ],
)
def test_values_that_are_refused(value, error, text):
    with pytest.raises(error, match=text):
        DraftOptions(draft_weights=value)


def test_ranks_that_share_a_draft_are_refused():
    with pytest.raises(ValueError, match=r"draft_weights: .* leave draft_tensor_parallel_size out"):
        DraftOptions(draft_weights="fp8", draft_tensor_parallel_size=2)
    assert DraftOptions(draft_weights="fp8").draft_ranks == 1 and DraftOptions().draft_ranks is None
    assert parse_formats("fp8") == {"layers": "fp8", "output": "fp8"} and parse_formats(None) == {}
    assert "draft_weights" in {field.name for field in dataclasses.fields(DraftOptions)}
