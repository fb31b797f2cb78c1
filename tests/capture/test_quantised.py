"""Quantised targets: what is not read is refused by name; what is read gives transformers' own answers."""

import dataclasses
import operator

import models
import pytest
import quantised_checkpoints as checkpoints
import torch
from quantised_models import (
    IDS,
    LIBRARY,
    ON_LOADING,
    PACKED_BY_HAND,
    build_fp8_mixture,
    fp8_forward,
    load,
    parts_at_near_tie,
)
from torch import nn
from toy_graphs import prefix_then_chunk
from transformers import GgufConfig, GPTQConfig, QuantoConfig
from transformers.integrations.finegrained_fp8 import FP8Linear

from spec_compile import UnsupportedModelError, passes, quantised, speculate
from spec_compile.capture.checks import check_tree
from spec_compile.capture.quantised import hold_one_layout, packed_layers
from spec_compile.capture.trace import capture
from spec_compile.graph import ModelGraph, calls
from spec_compile.inventory import held_tensors
from spec_compile.kernels import linear
from spec_compile.kernels.linear import QUANTISED, cpu_gemm
from spec_compile.passes import fuse_append, fuse_residuals, fuse_swiglu, use_linear_forms
from spec_compile.passes.row_invariance import variant_parts

FEW_ROWS = use_linear_forms, fuse_swiglu, fuse_residuals, fuse_append
GREEDY = dict(do_sample=False, max_new_tokens=48, eos_token_id=None, pad_token_id=0)


def own_answer(name, folder):
    """The greedy answer of transformers' own loop, of another model, because its forward may unpack it."""
    return load(name, folder, dtype_of(name)).generate(IDS, **GREEDY)


def dtype_of(name):
    """The dtype in which tokens are transformers' own on every CPU. In float64 no sum is so near to the tie of two
    codes that its order decides."""
    return torch.float64 if name in ROUNDED else torch.float32


def refuses(model, *texts):
    """Assert that `model` is refused with a message that has all of the texts."""
    with pytest.raises(UnsupportedModelError) as raised:
        speculate(model, compile=False)
    assert all(text in str(raised.value) for text in texts), str(raised.value)


UP_PROJ = "model.layers.1.mlp.up_proj"


def of_class(cls, module):
    """A change: a layer of a model becomes one of another library's class."""

    def change(model):
        layer = model.get_submodule(UP_PROJ)
        layer.__class__ = type(cls, (nn.Linear,), {"__module__": module})

    return change


def with_method(method):
    """A change: the configuration names a method of quantisation."""

    def change(model):
        model.config.quantization_config = QuantoConfig(weights="int4") if method == "quanto" else GPTQConfig(bits=4)
        model.config.quantization_config.quant_method = method

    return change


def of_foreign_tensors(model):
    packed, layer = type("PackedTensor", (torch.Tensor,), {"__module__": "torchao.x"}), model.get_submodule(UP_PROJ)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(packed))


def in_fp8(block, scheme):
    """A change: a layer becomes one in FP8."""
    return lambda model: setattr(model.model.layers[1].mlp, "up_proj", FP8Linear(64, 96, block, scheme))


def with_values(owner, **values):
    """A change: the part of a model at a path has other attributes."""

    def change(model):
        for name, value in values.items():
            setattr(operator.attrgetter(owner)(model), name, value)

    return change


def with_number(path, place, value):
    """A change: a tensor of a model has another number at one place."""

    def change(model):
        operator.attrgetter(path)(model).data[place] = value

    return change


def with_quantised_head(model):
    model.lm_head = FP8Linear(checkpoints.H, checkpoints.VOCAB, (128, 128))
    model.lm_head.weight_scale_inv.data.fill_(1)


WEIGHTS, INPUTS = (f"{UP_PROJ}.quantization_scheme.{part}" for part in ("weights", "input_activations"))
REFUSED = [
    ("llama", with_method("quanto"), ["'quanto'", "not read yet"]),
    ("qwen3_moe", with_method("gptq"), ["mixture of experts", "gptq", "random"]),
    ("qwen3_moe", with_method("awq"), ["mixture of experts", "awq", "random"]),
    ("llama", of_class("PackedLinear", "gptqmodel.nn_modules"), ["PackedLinear", UP_PROJ, "not read yet"]),
    ("llama", of_class("PackedLinear", "transformers.integrations.mxfp4"), ["PackedLinear", UP_PROJ, "not read yet"]),
    (
        "llama", of_class("KernelLinear", "gptqmodel.nn_modules.qlinear.marlin"),
        ["KernelLinear", UP_PROJ, "repacked", 'GPTQConfig(bits=4, backend="gptq_torch")'],
    ),
    (
        "llama", of_class("KernelLinear", "gptqmodel.nn_modules.qlinear.machete_awq"),
        ["KernelLinear", UP_PROJ, "repacked", 'backend="torch_awq"'],
    ),
    ("llama", of_foreign_tensors, ["PackedTensor", f"{UP_PROJ}.weight", "not read yet"]),
    ("llama", in_fp8(None, "dynamic"), [UP_PROJ, "one scale for the whole matrix"]),
    ("llama", in_fp8((128, 128), "static"), [UP_PROJ, "activations of the scheme 'static'"]),
    ("fp8_block", with_number(f"{UP_PROJ}.weight_scale_inv", (0, 0), float("nan")), [UP_PROJ, "not finite"]),
    (
        "fp8_block", with_values(UP_PROJ, weight_scale_inv=nn.Parameter(torch.ones(9, 3))),
        [UP_PROJ, "shape [9, 3], expected ["],
    ),
    ("fp8_block", with_quantised_head, ["quantised output head (lm_head)"]),
    ("ct_w4a16", with_values(WEIGHTS, actorder=None, num_bits=8), [UP_PROJ, "8 bits"]),
    ("ct_w4a16", with_values(WEIGHTS, symmetric=False), [UP_PROJ, "zero points"]),
    ("ct_w4a16", with_values(WEIGHTS, strategy="tensor", group_size=None), [UP_PROJ, "strategy 'tensor'"]),
    ("ct_w4a8_bytes", with_values(INPUTS, num_bits=16), [UP_PROJ, "activations to 8 bits"]),
    ("ct_w4a8_bytes", with_values(INPUTS, strategy="tensor"), [UP_PROJ, "a scale for each token"]),
    ("ct_w4a8_bytes", with_number(f"{UP_PROJ}.weight", (3, 5), 8), [UP_PROJ, "not of 4 bits"]),
    *(
        ("ct_nvfp4_both", with_values(INPUTS, **{name: value}), [UP_PROJ, "scales in FP8 for each 16 inputs"])
        for name, value in (("scale_dtype", None), ("dynamic", False), ("group_size", 32))
    ),
    (
        "ct_fp8", with_values("config.quantization_config.quantization_config", kv_cache_scheme=dict(num_bits=8)),
        ["kv_cache_scheme"],
    ),
    ("ct_w4a16", lambda model: model(IDS), ["model.layers.0.self_attn.q_proj (Linear)", "unpacked", "load it again"]),
    ("modelopt", lambda model: None, ["'modelopt'", "did not apply", "load a checkpoint"]),
    (
        "fp8 mixture", with_values("model.layers.1.mlp.experts", activation_scheme="static"),
        ["model.layers.1.mlp.experts (FP8Experts)", "scheme 'static'"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("name, change, texts", REFUSED)
def test_what_is_not_read_is_refused_by_name(name, change, texts, tmp_path):
    if name in models.ADMITTED:
        model = models.ADMITTED[name]()
    else:
        model = build_fp8_mixture(moe_intermediate_size=128) if name == "fp8 mixture" else load(name, tmp_path)
    change(model)
    refuses(model, *texts)


SERVED = ["fp8_block", *LIBRARY, *PACKED_BY_HAND]
COMPARED = [name for name in SERVED if name != "ct_nvfp4_both"]
"""Formats whose libraries compute in the dtype of the model; the other one rounds weights to bfloat16."""
ROUNDED = ["fp8_block", "ct_fp8", "ct_fp8_static", "ct_w4a8", "ct_w4a8_bytes", "ct_w4afp8"]
"""Formats among them that round activations too."""
KERNELS = [name for name in COMPARED if name not in ("gptq_by_activation", "ct_fp8_static")]
"""Formats with a kernel for few rows."""
UNMERGED = ["gptq_by_activation", "ct_fp8_static"]
"""Formats that no kernel reads, or with a scale for all."""
if cpu_gemm.BEST == 0:
    UNMERGED += ["gptq", "awq", "nf4", "nf4_nested", "fp4"]  # whose parts have outputs in another dimension


@pytest.mark.sweep("fp8_block ct_fp8 ct_w4a16 ct_w4a8 nf4 ao_int8")
@pytest.mark.parametrize("name", COMPARED)
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    model, wanted = load(name, tmp_path, dtype_of(name)), own_answer(name, tmp_path)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items() if type(tensor) is torch.Tensor}
    fast = speculate(model, compile=False)
    for _ in range(2):  # the second answer is drafted from the first
        assert torch.equal(fast.generate(IDS, **GREEDY), wanted)
    assert sum(fast.speculation.stats.accepted) > 0
    after = model.state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())  # still packed
    assert torch.equal(model.generate(IDS, **GREEDY), wanted)


@pytest.mark.sweep("fp8_block-cpu")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", SERVED)
def test_the_answer_in_16_bits(name, device, tmp_path):
    dtype = torch.float16 if name in PACKED_BY_HAND and device == "cuda" else torch.bfloat16
    model = load(name, tmp_path, dtype).to(device)
    fast = speculate(model, compile=device == "cuda")  # which compares logits with the plain meaning
    assert fast.generate(IDS.to(device), **GREEDY).shape == (1, 68)


@pytest.mark.sweep("fp8_block")
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_activations_part_only_at_near_ties(name, tmp_path):
    """In float32, by the kernels. The yardstick is the logits before activations are rounded."""
    model = load(name, tmp_path)
    fast = speculate(model, compile=False)
    answers = [fast.generate(IDS, **GREEDY)[0] for _ in range(2)]
    wanted = model.generate(IDS, **GREEDY)[0]
    for answer in answers:
        assert parts_at_near_tie(fast, answer, wanted)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", SERVED)
def test_layers_of_one_input_are_merged_without_a_copy(name, tmp_path):
    model = load(name, tmp_path)
    hold_one_layout(model)
    graph = capture(model)
    assert len(calls(graph.gm, QUANTISED)) == 14
    verify = passes.run(graph, passes.Settings())
    if name in UNMERGED:
        assert len(calls(verify.gm, QUANTISED)) == 14
        return
    assert len(calls(verify.gm, QUANTISED)) == 8
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            parts = [quantised.read(part).parts for part in group]
            for tensors in zip(*(part.values() for part in parts)):
                assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Passes take a graph for one on a GPU."""
    for module in ("attention.tree_attention", "norms"):
        pytest.importorskip(f"spec_compile.kernels.{module}", exc_type=ImportError)
    monkeypatch.setattr(ModelGraph, "device", property(lambda graph: torch.device("cuda")))
    monkeypatch.setattr(linear.skinny_gemm, "why_not_on", lambda device: None)
    monkeypatch.setattr(linear, "FORMS", (dataclasses.replace(linear.SKINNY_GEMM, device="cpu"),))


@pytest.mark.sweep("ct_fp8 ct_w4a8 ct_fp8_static gptq nf4 ao_int8 gptq_by_activation")
@pytest.mark.parametrize("name", [*KERNELS, "gptq_by_activation", "ct_fp8_static"])
def test_layers_take_the_kernel_for_few_rows(name, tmp_path, as_on_gpu, monkeypatch):
    """In a graph that passes take for one on a GPU. The ops' plain meanings run here.

    A constant scale is that of normed activations, so that no norm is applied after the product.
    """
    model = load(name, tmp_path, torch.float16 if name in PACKED_BY_HAND else torch.bfloat16)
    for tensor in held_tensors(model):  # a file need not be aligned in memory, as a GPU's is
        tensor.data = tensor.data.clone()
    hold_one_layout(model)
    graph = capture(model)
    plain = passes.run(graph, passes.Settings(), [each for each in passes.PIPELINE if each not in FEW_ROWS])
    ours = passes.run(graph, passes.Settings())
    is_static = name == "ct_fp8_static"
    if not is_static:  # its errors are larger
        with monkeypatch.context() as on_cpu:
            on_cpu.setattr(ModelGraph, "device", torch.device("cpu"))
            check_tree(name, graph, ours)
    if name == "gptq_by_activation":
        assert len(calls(ours.gm, QUANTISED)) == 14
        assert "model.layers.0-1.mlp.down_proj: quantised product by a library" in variant_parts(ours)
        return
    assert not calls(ours.gm, QUANTISED) and (is_static or variant_parts(ours) == [])
    products = [node.kwargs for node in calls(ours.gm, linear.PRODUCT)]
    if is_static:
        assert not [product for product in products if "squares" in product and "kind" in product]
    else:
        half = name in PACKED_BY_HAND  # float16, in which no norm joins a product
        assert [len(calls(ours.gm, op)) for op in (linear.TO_HEADS, linear.TO_STREAM)] == [2, 0 if half else 4]
        assert ["squares" in product for product in products if product.get("gated")] == [not half] * 2
    for want, got in zip(prefix_then_chunk(plain.gm, graph), prefix_then_chunk(ours.gm, graph), strict=True):
        moves = name in ROUNDED
        error = 0.12 if moves else 0.03  # codes of activations move, see docs/quantised.md
        assert (got.float() - want.float()).norm() < error * want.float().norm()


@pytest.mark.parametrize("name", ON_LOADING)
def test_refresh_refuses_weights_that_it_cannot_copy(name, tmp_path):
    model, other = load(name, tmp_path), load(name, tmp_path)
    fast = speculate(model, compile=False)
    model.model.layers[1].mlp.up_proj.weight = other.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"speculate\(\) again"):
        fast.speculation.refresh()


@pytest.mark.sweep("fp8_block")
@pytest.mark.parametrize("name", [name for name in COMPARED if name not in ON_LOADING])
def test_refresh_takes_over_other_quantised_weights(name, tmp_path):
    model = load(name, tmp_path, dtype_of(name))
    fast = speculate(model, compile=False)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for key in state:
        if "scale" in key:
            state[key] *= 1.5
    model.load_state_dict(state, assign=True)
    fast.speculation.refresh()
    assert torch.equal(fast.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", SERVED)
def test_a_layer_means_what_its_library_computes(name, tmp_path):
    model, own = load(name, tmp_path), load(name, tmp_path)
    own(IDS)  # unpacks some
    for path, packed in packed_layers(model).items():
        layer = own.get_submodule(path)
        arguments = torch.randn(3, 5, layer.in_features), list(packed.parts.values()), packed.bias, packed.layout.kind
        torch.testing.assert_close(QUANTISED(*arguments), layer(arguments[0]), rtol=1e-5, atol=1e-5)
    torch.library.opcheck(QUANTISED, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize(("outputs", "inputs"), [(128, 256), (200, 300), (64, 100)])
def test_fp8_blocks_of_any_size(outputs, inputs):
    layer = FP8Linear(inputs, outputs, (128, 128), has_bias=True)
    layer.weight.data = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    layer.weight_scale_inv.data.uniform_(0.5, 2)
    layer.bias.data.normal_()
    packed = quantised.read(layer)
    x = torch.randn(4, inputs)
    got = QUANTISED(x, list(packed.parts.values()), packed.bias, packed.layout.kind)
    torch.testing.assert_close(got, fp8_forward(layer, x) + layer.bias, rtol=1e-5, atol=1e-4)
    weight = packed.layout.unrounded(torch.eye(inputs), list(packed.parts.values()), None).T
    assert weight[-1, -1] == layer.weight[-1, -1].float() * layer.weight_scale_inv[-1, -1]


@pytest.mark.parametrize("name", ["ct_nvfp4", "ct_nvfp4_both"])
def test_nvfp4_is_what_its_library_unpacks(name, tmp_path):
    """The library rounds weights to bfloat16."""
    pytest.importorskip("compressed_tensors")
    model, own = (load(name, tmp_path, torch.bfloat16) for _ in range(2))
    own(IDS)
    layers = packed_layers(model)
    assert len(layers) == 14
    for path, packed in layers.items():
        layer = own.get_submodule(path)
        assert torch.equal(packed.weight().bfloat16(), layer.weight)
        x = torch.randn(3, 5, layer.in_features, dtype=torch.bfloat16) * torch.tensor([0, 1e-4, 1, 9, 99])[:, None]
        got = QUANTISED(x.bfloat16(), list(packed.parts.values()), packed.bias, packed.layout.kind)
        torch.testing.assert_close(got, layer(x.bfloat16()), rtol=0.01, atol=0.01)
    fast = speculate(model, compile=False)
    plain = fast.generate(IDS, speculation=False, **GREEDY)
    assert torch.equal(fast.generate(IDS, **GREEDY), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_in_nvfp4_are_those_of_the_library(dtype, tmp_path):
    """Bit by bit, with ties, zeros, numbers above the largest scale, and such as have a scale of 0."""
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    layer = load("ct_nvfp4_both", tmp_path, torch.bfloat16).model.layers[0].mlp.up_proj
    x = torch.randn(2, 6, 64) * torch.tensor([0, 1e-6, 1e-3, 1, 30, 3000])[:, None]
    x[0, 3, :16] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -2.5, 0, -3.5, -5])
    x, scheme = x.to(dtype), layer.quantization_scheme.input_activations
    got = quantised.fp4.rounded_groups(x, 16, layer.input_global_scale)
    assert torch.equal(got, lifecycle.forward_quantize(layer, x.clone(), "input", scheme))


@pytest.mark.parametrize("form", ["gptq", "experts in fp8"])
def test_forms_that_are_not_read_where_transformers_has_sharded_them(form, tmp_path, monkeypatch):
    monkeypatch.setattr("spec_compile.capture.quantised.is_sharded", lambda model: True)
    model = load("gptq", tmp_path) if form == "gptq" else build_fp8_mixture(moe_intermediate_size=128)
    refuses(model, "shared it out among ranks", "without tp_plan", 'tensor_parallel="auto"')


def test_gguf_is_plain_weights():
    model = models.ADMITTED["llama"]()
    model.config.quantization_config = GgufConfig()
    ids = IDS % models.VOCAB
    fast = speculate(model, compile=False)
    assert torch.equal(fast.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.slow
def test_a_draft_model_may_be_quantised(tmp_path):
    model = load("plain", tmp_path / "target")
    draft = load("fp8_block", tmp_path / "draft")
    fast = speculate(model, "draft_model", draft=draft, adaptive=False, compile=False)
    assert torch.equal(fast.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))
    assert fast.speculation.stats.accept_length > 2
