"""`artefact_key`: equal models have one key in every process, and each ingredient that changes gives another."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import models
import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama import modeling_llama

from spec_compile import speculate
from spec_compile.compile import key as keys
from spec_compile.compile.key import Digest, artefact_key
from spec_compile.config import Options
from spec_compile.drafters.ngram import NgramOptions
from spec_compile.drafters.options import DraftOptions
from spec_compile.kernels.linear import skinny_gemm

OPTIONS = NgramOptions()


def llama():
    return models.ADMITTED["llama"]()


def key_of(model=None, draft=None, options=OPTIONS, name="ngram"):
    return artefact_key([llama() if model is None else model, draft], options, name)


@pytest.fixture(scope="module")
def plain():
    return key_of()


def test_values_of_weights_places_and_use_do_not_count(plain):
    model = llama()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(1)
    model.config._name_or_path = model.name_or_path = "/somewhere/else"
    model.config.transformers_version = "0"
    model.train()
    assert key_of(model) == plain
    fast = speculate(model, compile=False, check=False)
    fast.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False)
    assert key_of(model) == plain


def set_in(model, path, name, value):
    setattr(model.get_submodule(path), name, value)


def replace_parameter(model, change):
    proj = model.model.layers[1].mlp.up_proj
    proj.weight = nn.Parameter(change(proj.weight.detach()))


def retie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


MODELS = {
    "plain attribute": lambda m: set_in(m, "model.layers.1.input_layernorm", "variance_epsilon", 1e-3),
    "attribute of one more": lambda m: set_in(m, "model.layers.1", "scale", 2.0),
    "private attribute": lambda m: set_in(m, "", "_scale", 2.0),
    "list in an attribute": lambda m: set_in(m, "model.layers.1", "scales", [1, (2.0, {"a": 3})]),
    "small tensor in an attribute": lambda m: set_in(m, "model.layers.1", "scale", torch.tensor(2.0)),
    "dtype": lambda m: m.to(torch.bfloat16),
    "dtype of one parameter": lambda m: replace_parameter(m, torch.Tensor.double),
    "shape": lambda m: replace_parameter(m, lambda weight: weight[:-1]),
    "strides": lambda m: replace_parameter(m, lambda weight: weight.T.contiguous().T),
    "buffer": lambda m: m.model.layers[0].register_buffer("more", torch.zeros(3)),
    "parameter that is gone": lambda m: set_in(m, "lm_head", "weight", None),
    "tie": retie,
    "class": lambda m: set_in(m, "lm_head", "__class__", Scaled),
    "layer": lambda m: m.model.layers.append(m.model.layers[0]),
    "order of modules": lambda m: m._modules.update(model=m._modules.pop("model")),
    "forward of an object": lambda m: set_in(m, "lm_head", "forward", lambda x: x),
    "config field": lambda m: setattr(m.config, "rms_norm_eps", 1e-3),
    "nested config field": lambda m: m.config.rope_parameters.update(rope_theta=5e5),
    "new config field": lambda m: setattr(m.config, "extra", 1),
    "attention implementation": lambda m: m.set_attn_implementation("eager"),
    "adapter": lambda m: (peft := pytest.importorskip("peft")).inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=["q_proj"]), m
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", MODELS)
def test_a_changed_model_has_another_key(change, plain):
    model, other = llama(), llama()
    MODELS[change](model)
    MODELS[change](other)
    assert key_of(model) != plain
    assert key_of(model) == key_of(other)


@pytest.mark.parametrize("scaling", [1.0, 2.0])
def test_a_changed_adapter_has_another_key(scaling):
    peft = pytest.importorskip("peft")
    wrapped = [peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"])) for _ in range(2)]
    first, second = (each.get_base_model() for each in wrapped)
    first.model.layers[0].self_attn.q_proj.scaling["default"] = scaling
    assert (key_of(first) == key_of(second)) == (scaling == 2)


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    return q + cos.unsqueeze(unsqueeze_dim) * 0, k


def make_rotate(scale):
    return lambda q, k, cos, sin, unsqueeze_dim=1: (q * scale, k)


CODE = {
    "function of the modelling file": lambda p: p.setattr(modeling_llama, "apply_rotary_pos_emb", rotate),
    "function that it calls": lambda p: p.setattr(modeling_llama, "rotate_half", lambda x: x),
    "method": lambda p: p.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x),
    "method of a base class": lambda p: p.setattr(transformers.PreTrainedModel, "get_output_embeddings", lambda s: s),
    "method of torch": lambda p: p.setattr(nn.Linear, "forward", lambda self, x: x),
    "attribute of a class": lambda p: p.setattr(modeling_llama.LlamaAttention, "scale", 3.0, raising=False),
    "function of masks": lambda p: p.setattr(modeling_llama, "create_causal_mask", lambda *a, **k: None),
    "function that makes masks": lambda p: p.setattr(transformers.masking_utils, "causal_mask_function", lambda *a: a),
    "attention": lambda p: p.setitem(AttentionInterface._global_mapping, "sdpa", rotate),
    "activation": lambda p: p.setattr(transformers.activations.SiLUActivation, "forward", lambda self, x: x),
}  # fmt: skip


@pytest.mark.parametrize("patch", CODE)
def test_patched_code_has_another_key(patch, plain, monkeypatch):
    CODE[patch](monkeypatch)
    assert key_of() != plain


def user_function(scale=1, path="/a.py", begin="", text="'a'"):
    """A function of a user's module."""
    source = begin + f"def rotate(q, k, cos, sin):\n    return SCALE, {text} in {{'a', 'b', 'c'}}, [x for x in q]"
    names = {"__name__": "modelling_of_a_user", "SCALE": scale}
    exec(compile(source, path, "exec"), names)
    return names["rotate"]


@pytest.mark.parametrize(
    "make, same, other",
    [
        (make_rotate, dict(scale=2), dict(scale=3)),
        (partial(partial, rotate), dict(unsqueeze_dim=1), dict(unsqueeze_dim=2)),
        (user_function, dict(), dict(scale=2)),
        (user_function, dict(path="/b.py", begin="\n\n"), dict(text="'b'")),
    ],
    ids=["closure", "partial", "globals", "code but no lines and paths"],
)
def test_what_decides_a_function_counts(make, same, other, monkeypatch):
    found = []
    for function in (make(**same), make(**(dict() if make is user_function else same)), make(**other)):
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
        found.append(key_of())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_may_change_values_prevents_an_artefact(register, plain):
    model, draft, quiet = llama(), llama(), llama()
    quiet.enable_input_require_grads()
    assert key_of(quiet) is not None
    for each in (model, draft):
        handle = getattr(each.model.layers[1].mlp, register)(lambda *_: None)
        assert key_of(model, draft) is None
        handle.remove()
    assert key_of(model, draft) not in (None, plain)
    handle = getattr(nn.modules.module, register.replace("register", "register_module"))(lambda *_: None)
    try:
        assert key_of(model) is None
    finally:
        handle.remove()
    assert key_of(model) == plain


def test_every_option_counts(plain):
    assert key_of(options=dataclasses.replace(OPTIONS)) == plain
    others = {
        "num_draft_tokens": 8, "max_cache_len": 64, "exact": "bits", "kv_cache_dtype": "fp8", "branch_length": 20,
        "weights": "fp8", "convert_bfloat16": False,
        "min_match_window_size": 2, "max_match_window_size": 9, "min_bfs_breadth": 2, "max_bfs_breadth": 7,
        "match_type": "PROB", "capacity": 10_000, "attention_backend": {"verify": "triton"}, "max_loras": 2,
        "max_lora_rank": 8, "recycle": 4,
    }  # fmt: skip
    needed = {"max_lora_rank": {"max_loras": 3}}
    uncounted = {"artefact", "cache", "prefix_cache_bytes", "prefix_cache_host_bytes", "tensor_parallel"}
    uncounted.add("trust_artefact")
    found = {plain}
    for field in dataclasses.fields(NgramOptions):
        if field.name not in uncounted:
            value = others[field.name] if field.name in others else not getattr(OPTIONS, field.name)
            changed = {field.name: value, **needed.get(field.name, {})}
            found.add(key_of(options=dataclasses.replace(OPTIONS, **changed)))
    assert len(found) == len(dataclasses.fields(NgramOptions)) - len(uncounted) + 1
    assert key_of(options=dataclasses.replace(OPTIONS, cache=False, prefix_cache_host_bytes=0)) == plain
    assert key_of(options=Options()) != plain != key_of(name="eagle")


def test_the_draft_counts_and_its_folder_does_not():
    options = [DraftOptions(draft=place) for place in ("/a", "/b")]
    target, draft, other = llama(), models.ADMITTED["qwen2"](), models.ADMITTED["qwen2"]()
    other.config.rms_norm_eps = 1e-3
    first = key_of(target, draft, options[0])
    assert first == key_of(target, draft, options[1])
    assert len({first, key_of(target, other, options[0]), key_of(target, None, options[0])}) == 3
    draft.lm_head.weight = target.lm_head.weight
    tied = key_of(target, draft, options[0])
    draft.lm_head.weight = nn.Parameter(target.lm_head.weight.clone())
    assert tied != key_of(target, draft, options[0])


PROCESS = {
    "threads": lambda p: p.setattr(torch, "get_num_threads", lambda: 77),
    "flags of the CPU": lambda p: p.setattr(keys, "_cpu_flags", lambda: "flags: none"),
    "level of products": lambda p: p.setattr(keys.cpu_gemm, "BEST", -1),
    "level of attention": lambda p: p.setattr(keys.cpu_attention, "BEST", -1),
    "version of torch": lambda p: p.setattr(torch, "__version__", "9"),
    "commit of torch": lambda p: p.setattr(torch.version, "git_version", "0"),
    "version of transformers": lambda p: p.setattr(transformers, "__version__", "9"),
    "version of Triton": lambda p: p.setattr(keys, "_triton_version", lambda: "9"),
    "version of Python": lambda p: p.setattr(keys.platform, "python_version", lambda: "9"),
    "version of CUDA": lambda p: p.setattr(torch.version, "cuda", "99"),
    "package": lambda p: p.setattr(keys, "package_digest", lambda: "other"),
    "precision": lambda p: p.setattr(torch, "get_float32_matmul_precision", lambda: "high"),
    "deterministic algorithms": lambda p: p.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True),
}  # fmt: skip


@pytest.mark.parametrize("change", PROCESS)
def test_another_process_or_machine_has_another_key(change, plain, monkeypatch):
    PROCESS[change](monkeypatch)
    assert key_of() != plain


@pytest.mark.parametrize(
    "setting",
    [torch._dynamo.config.patch(assume_static_by_default=False), torch._inductor.config.patch(max_fusion_size=3)],
)
def test_settings_of_compilers_count(plain, setting, tmp_path):
    with setting:
        assert key_of() != plain
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        assert key_of() == plain


def test_a_gpu_counts_by_name_capability_and_plans(plain, monkeypatch, tmp_path):
    gpu = {"name": "H100", "major": 9, "minor": 0, "multi_processor_count": 132}
    monkeypatch.setattr(keys, "held_parameters", lambda model: iter([SimpleNamespace(device=torch.device("cuda", 0))]))
    monkeypatch.setattr(skinny_gemm, "tuned_file", lambda device: tmp_path / "plans.json")
    found = {plain}
    for change in ({}, {"name": "H200"}, {"major": 10}, {"minor": 1}, {"multi_processor_count": 66}):
        properties = SimpleNamespace(**gpu | change)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        found.add(key_of())
    (tmp_path / "plans.json").write_text("{}")
    found.add(key_of())
    assert len(found) == 7
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert key_of() in found  # threads matter to code for a CPU only


def test_the_package_counts_by_its_files(monkeypatch, tmp_path):
    monkeypatch.setattr(keys, "PACKAGE", tmp_path)
    found = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("deep/b.so", ""), ("deep/b.so", "x"), ("notes.txt", "x")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        found.append(keys.package_digest.__wrapped__())
    assert len({*found}) == 4 and found[3] == found[4]


def digest_of(*values):
    digest = Digest()
    digest.add(*values)
    return digest.hex()


def test_values_that_differ_have_other_digests():
    values = [
        1, 1.0, True, "1", b"1", None, (), [], {}, set(), "", (1,), [1], {1}, {1: 1}, {1: 2}, {"1": 1}, (1, (2,)),
        ((1,), 2), ("ab", "c"), ("a", "bc"), -0.0, 0.0, float("nan"), torch.float32, torch.zeros(2), torch.zeros(2, 1),
        torch.ones(2), LlamaConfig, partial(int, "1"), partial(int, "2"), SimpleNamespace(a=1), SimpleNamespace(a=2),
    ]  # fmt: skip
    assert len({*map(digest_of, values)}) == len(values)
    assert digest_of(1, 2) != digest_of((1, 2))


def test_values_that_lead_back_to_themselves_have_digests():
    values = {"name": 1}
    values["self"] = values
    loop = SimpleNamespace(values=values)
    loop.loop = loop
    assert len(digest_of(loop, values)) == 64
    assert digest_of({1: "a", 2: "b"}) == digest_of({2: "b", 1: "a"})
