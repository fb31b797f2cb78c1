"""The option `draft_weights`: copies of a draft's matrices in fewer bits."""

import copy
import itertools

import changed_drafts as changed
import draft_rounds as rounds
import pytest
import quantised_checkpoints as quantised
import torch
from torch import nn
from transformers import PreTrainedModel

from spec_compile import speculate
from spec_compile.compile.key import artefact_key
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.heads import HeadAlgorithm, HeadOptions
from spec_compile.drafters.options import DraftOptions
from spec_compile.drafters.shared_draft import DraftWeights
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
    """A draft whose own matrices are rounded numbers. A whole model's output matrix is one of its layers."""
    is_model = isinstance(draft, PreTrainedModel)
    twin = copy.deepcopy(draft, {} if is_model else {id(draft.embedding): draft.embedding})
    for path, part in twin.named_modules():
        if isinstance(part, nn.Linear) and "layers" in parts and (is_model or path.startswith(("fc", "block"))):
            part.weight = rounded(part.weight, name)
    if "output" in parts and not is_model:
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
    ids = IDS[:, :1] if isinstance(draft, PreTrainedModel) else IDS  # a model reads prompts with its own weights
    before = {key: value.clone() for key, value in (target.state_dict() | draft.state_dict()).items()}
    system = speculate(target, algorithm, draft=draft, draft_weights=option, **OPTIONS | options)
    found = trees(system, target, ids)
    twin = speculate(target, algorithm, draft=twin_of(draft, name, parts), **OPTIONS | options)
    assert found == trees(twin, target, ids) and len(found) > 3
    after = target.state_dict() | draft.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    return system


CASES = [*itertools.product(("eagle", "eagle3", "mtp", "draft_model"), FORMATS)]
CASES += [("dflash", "int4"), ("dflash", "fp8"), ("domino", "int8"), ("p_eagle", "fp8"), ("31B", "int8")]


@pytest.mark.sweep("eagle3-fp8 eagle-int4 mtp-int8 draft_model-int8 dflash-int4 p_eagle-fp8")
@pytest.mark.parametrize(("name", "weights"), CASES)
def test_drafts_are_those_of_rounded_weights(name, weights, tmp_path):
    options = TREE if name in ("eagle", "eagle3", "mtp") else dict(num_steps=3)
    system = same_drafts(*changed.named(tmp_path, name), weights, **{} if name in ("dflash", "domino") else options)
    assert f"output matrix {weights}" in system.speculation.explain()


@pytest.mark.parametrize("part", ["layers", "output"])
def test_one_part(part, monkeypatch):
    monkeypatch.setattr(cpu_gemm, "BEST", 0)  # as on a CPU without a kernel
    target, head = rounds.target("llama"), rounds.head("eagle", "llama")
    system = same_drafts(target, "eagle", head, "int4", (part,), **TREE)
    told = "output matrix int4, 0.0 MB of copies" if part == "output" else "layers int4, "
    told, other = (told, "layers int4") if part == "output" else (told, "output matrix int4")
    text = system.speculation.explain()
    assert told in text and other not in text and "no kernel reads these copies here" in text


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
    monkeypatch.setattr(skinny_gemm, "why_not_on", lambda device: None)


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
    target = quantised.write_draft("nf4", "eagle3", tmp_path).target.to(torch.bfloat16)
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
    ("options", "text"),
    [
        (dict(draft_weights="fp4"), r"draft_weights: expected one of fp8, int8, int4, or a dict .*got 'fp4'. Did you"),
        (dict(draft_weights={"lm_head": "fp8"}), "draft_weights: .*layers and output, got 'lm_head'"),
        (dict(draft_weights={"layers": None}), "draft_weights: .* got None"),
        (dict(draft_weights=8), "draft_weights: expected one of .*, got int"),
        (dict(draft_weights="fp8", draft_tensor_parallel_size=2), "leave draft_tensor_parallel_size out"),
    ],
)
def test_values_that_are_refused(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        DraftOptions(**options)


def test_ranks_do_not_share_a_rounded_draft():
    assert DraftOptions(draft_weights="fp8").draft_ranks == 1 and DraftOptions().draft_ranks is None
