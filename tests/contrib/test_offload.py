"""Models that accelerate has offloaded: the tokens and bits of models in memory, fetches, refusals, and a user's model
that keeps its hooks."""

import copy
import shutil
from types import SimpleNamespace

import accelerate
import models
import pytest
import torch
from accelerate.hooks import LayerwiseCastingHook, add_hook_to_module
from offloaded import (
    CPU,
    QUICK,
    WAYS,
    answer,
    answers,
    answers_on,
    device_map,
    dispatched,
    from_pretrained,
    llama,
    mapped_file,
)

from spec_compile import passes, speculate
from spec_compile.capture.trace import capture
from spec_compile.contrib import offload
from spec_compile.errors import UnsupportedModelError
from spec_compile.graph import calls, layer_of


def places(net):
    """What a user's model has in its modules: the hooks and forwards, and the tensors with their devices."""
    hooks = [(id(vars(part).get("_hf_hook")), id(vars(part).get("forward"))) for part in net.modules()]
    return hooks, [(name, id(p), p.device) for name, p in net.named_parameters()]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_the_users_model(way, tied, tmp_path):
    want = answers(llama(tied))
    net = WAYS[way](llama(tied), tmp_path)
    assert any(p.is_meta for p in net.parameters())
    before = places(net)
    fast = speculate(net, compile=False, check=way == "half loaded")
    assert places(net) == before
    assert answers(fast) == want and max(fast.speculation.stats.nodes) > 1
    assert answers(net) == want  # by its own hooks
    assert answers(fast) == want  # whatever they moved meanwhile
    served = fast.speculation.original
    assert (served.lm_head.weight is served.model.embed_tokens.weight) == tied
    assert not any(hasattr(part, "_hf_hook") for part in served.modules())
    assert "a round reads" in fast.speculation.explain()


@pytest.mark.parametrize("way, ending", [("all on disk", ".dat"), ("half loaded", ".safetensors")])
def test_files_are_mapped_and_not_read_into_memory(way, ending, tmp_path):
    fast = speculate(WAYS[way](llama(), tmp_path), **QUICK)
    layer = fast.speculation.original.model.layers[1]
    for linear in (layer.self_attn.q_proj, layer.mlp.down_proj):
        assert mapped_file(linear.weight).endswith(ending)
    read = {parameter.data_ptr() for parameter in fast.speculation.engine.runtime.verify.gm.parameters()}
    assert layer.mlp.gate_proj.weight.data_ptr() in read  # the graph reads the same memory, merged with no other
    total = sum(offload.PLACES[p] == "on disk" and p.nbytes for p in layer.parameters())
    assert total == sum(p.nbytes for p in layer.parameters())


def test_bits_and_requests(tmp_path):
    """The log-probabilities of tokens have the bits of a model in memory, and requests its answers."""
    whole, rows = speculate(llama(), **QUICK), [row[0].tolist() for row in models.prompts()[0]]
    fast = speculate(dispatched(llama(), tmp_path), **QUICK)
    for got, want in zip(fast.speculation.score(rows), whole.speculation.score(rows), strict=True):
        assert torch.equal(got, want)
    outputs = fast.generate_batch(rows, max_new_tokens=12, do_sample=False).values()
    wanted = whole.generate_batch(rows, max_new_tokens=12, do_sample=False).values()
    assert [each.generated_tokens for each in outputs] == [each.generated_tokens for each in wanted]


def test_a_copy_of_the_result_and_speculate_again(tmp_path):
    net = dispatched(llama(), tmp_path)
    fast = speculate(net, **QUICK)
    again = speculate(fast, num_draft_tokens=4, **QUICK)
    shutil.rmtree(tmp_path / "offloaded")  # mapped files stay until nobody reads them
    want = answers(llama())
    assert answers(fast) == answers(again) == answers(copy.deepcopy(fast)) == want


# --- changes after speculate()


def test_changes_of_the_users_model(tmp_path):
    net = dispatched(llama(), tmp_path)
    fast = speculate(net, **QUICK)
    ids = models.prompts()[0][0]
    net.model.layers[1].self_attn.scaling *= 2  # of an offloaded layer
    with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn\.scaling was .* call speculate\(\) again"):
        answer(fast, ids)
    net.model.layers[1].self_attn.scaling /= 2
    linear = net.model.layers[0].mlp.up_proj  # stays in memory
    linear.weight = torch.nn.Parameter(linear.weight * 1.5)
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.up_proj\.weight was moved or replaced .*refresh\(\)"):
        answer(fast, ids)
    fast.speculation.refresh()
    assert answer(fast, ids) == answer(net, ids)


def test_values_in_memory_that_change_in_place_are_used():
    net, weights = llama(), {}
    weights |= {name: value.clone() for name, value in net.state_dict().items()}
    accelerate.cpu_offload(net, CPU, state_dict=weights)
    fast, ids = speculate(net, **QUICK), models.prompts()[0][0]
    weights["model.layers.0.mlp.up_proj.weight"].mul_(1.5)
    assert answer(fast, ids) == answer(net, ids)


# --- refusals, after which the user's model answers as before


def lose(net, folder):
    shutil.rmtree(folder / "offloaded")


def run_elsewhere(net, folder):
    net.model.layers[1]._hf_hook.execution_device = 1


def cast(net, folder):
    add_hook_to_module(net.model.layers[0].mlp, LayerwiseCastingHook(torch.float16, torch.float32, False), append=True)


def quantise(net, folder):
    net.hf_quantizer = SimpleNamespace()


REFUSED = {
    lose: r"has lost the weights of model\.layers\.1.*, which were offloaded \(.*; load it again",
    run_elsewhere: "is spread over cpu, cuda:1; several GPUs need tensor_parallel",
    cast: "has hooks of accelerate that are not known here, LayerwiseCastingHook; load it again on a single device",
    quantise: "has quantised weights that accelerate has offloaded; load it again on a single device",
}


@pytest.mark.parametrize("spoil", REFUSED)
def test_refusals(spoil, tmp_path):
    net = dispatched(llama(), tmp_path)
    spoil(net, tmp_path)
    before = places(net)
    with pytest.raises(UnsupportedModelError, match=rf"^model: LlamaForCausalLM {REFUSED[spoil]}"):
        speculate(net, **QUICK)
    assert places(net) == before
    if spoil is quantise:
        del net.hf_quantizer
        assert answers(net) == answers(llama())


class Memory:
    """Stands for a GPU: `count` tensors can be pinned or moved to it, then an error is raised."""

    def __init__(self, monkeypatch, count, error):
        self.count, self.error, self.pinned = count, error, []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.take(tensor))
        monkeypatch.setattr(torch.Tensor, "detach", lambda tensor: Detached(self, tensor))

    def take(self, tensor):
        if not self.count:
            raise self.error
        self.count -= 1
        self.pinned.append(tensor.clone())
        return self.pinned[-1]


class Detached:
    """A tensor of which `Memory` makes copies."""

    def __init__(self, memory, tensor):
        self.memory, self.tensor = memory, tensor

    def to(self, device):
        return self.memory.take(self.tensor)


OUT = {
    "the GPU": (torch.OutOfMemoryError("Tried to allocate 2 GiB"), r"needs \d+\.\d\d GB of cuda:0, which has run out"),
    "the host": (RuntimeError("CUDA error: out of memory"), "GB of the host, for pinned memory, which has run out"),
    "python": (MemoryError(), "GB of the host, for pinned memory, which has run out"),
}


@pytest.mark.parametrize("count", [0, 3, 12])
@pytest.mark.parametrize("where", OUT)
def test_memory_that_runs_out_while_weights_are_placed(where, count, monkeypatch):
    """Whatever was pinned or moved is given back, and the user's model answers as before."""
    net, weights = llama(), {}
    weights |= {name: value.clone() for name, value in net.state_dict().items()}
    accelerate.cpu_offload(net, CPU, state_dict=weights)
    hooks = [each._hf_hook for each in net.modules() if hasattr(each, "_hf_hook")]
    found = [
        offload.Offloaded(part, path, name, weights[f"{path}.{name}"], "in the host's memory")
        for path, part in net.named_modules()
        for name, held in part._parameters.items()
        if held is not None
    ]
    assert hooks and len(found) > 12
    error, text = OUT[where]
    with monkeypatch.context() as patch:
        memory = Memory(patch, count, error)
        with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM is offloaded and .*{text}"):
            offload.moved(net, offload.to_fetch(net, found), torch.device("cuda", 0))
    taken = {tensor.data_ptr() for tensor in memory.pinned}
    assert len(memory.pinned) == count
    assert not any(value.data_ptr() in taken for value in weights.values())
    assert answers(net) == answers(llama())


def test_pinned_weights_are_those_of_the_users_map(monkeypatch):
    """So the host has them once."""
    net, pinned = llama(), []
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    values = [offload.Offloaded(net, "", name, value, "", True) for name, value in weights.items()]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    got = offload.moved(net, values, torch.device("cuda", 0))
    assert [each.data_ptr() for each in got] == [each.data_ptr() for each in weights.values()]
    assert {each.data_ptr() for each in got} == {each.data_ptr() for each in pinned}


def test_another_error_while_weights_are_placed(monkeypatch):
    net = llama()
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    values = [offload.Offloaded(net, "", name, value, "", True) for name, value in weights.items()]
    with monkeypatch.context() as patch:
        Memory(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            offload.moved(net, values, torch.device("cuda", 0))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in weights.items())


@pytest.mark.parametrize(
    "full, text", [(0, r"of cuda:0, which has 0\.00 GB free"), (1, "of the host, for pinned memory")]
)
def test_memory_that_cannot_suffice(full, text, monkeypatch):
    """The refusal names the device, what is needed and what is there, before anything is moved."""
    net = llama()
    values = [
        offload.Offloaded(net, "model.layers.0", name, value, "", number > 1)
        for number, (name, value) in enumerate(net.state_dict().items())
    ]
    free = [0 if full == each else 1 << 40 for each in range(2)]
    monkeypatch.setattr(offload, "card_of", lambda device: SimpleNamespace(lacks_tensor_cores=False))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 40))
    monkeypatch.setattr(offload.psutil, "virtual_memory", lambda: SimpleNamespace(available=free[1]))
    with pytest.raises(UnsupportedModelError, match=rf"is offloaded and needs \d+\.\d\d GB {text}"):
        offload._check_memory(net, values, torch.device("cuda", 0))


def test_bytes_that_are_needed():
    """Two matrices of 96 bytes in a layer, one of 100 in another, and a vector of 40 that stays on the GPU."""
    tensors = [torch.zeros(24), torch.zeros(24), torch.zeros(25), torch.zeros(10)]
    paths = ["model.layers.0.mlp", "model.layers.0.attn", "model.layers.1.mlp", "model.norm"]
    found = [
        offload.Offloaded(None, path, "weight", each, "", path != "model.norm")
        for path, each in zip(paths, tensors, strict=True)
    ]
    assert offload.needed(found) == (40 + 2 * 96, 3 * 128)


@pytest.mark.parametrize("op", ["fetch", "fetch_experts"])
def test_a_device_without_room_for_a_layer(op, monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")

    held = torch.zeros(3, 500_000)
    arguments = (held, "cpu") if op == "fetch" else (held, torch.zeros(1, 1, dtype=torch.int64))
    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(torch.OutOfMemoryError, match=r"cpu has no 0\.006 GB left for offloaded weights"):
        getattr(offload, op)(*arguments)


def test_an_offloaded_draft_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"is offloaded by accelerate.*without device_map"):
        speculate(llama(), "draft_model", draft=dispatched(llama(), tmp_path), **QUICK)


# --- fetches, on a CPU from one place in memory to another


@pytest.mark.parametrize("tied", [False, True])
def test_fetches(tied, tmp_path):
    """Each layer fetches its matrices once, and no other weight is fetched."""
    net = offload.without_hooks(accelerate.cpu_offload(llama(tied), CPU), fetches=True)
    assert answers(net) == answers(llama(tied))  # by its own forward
    fast = speculate(net, compile=False)
    assert answers(fast) == answers(llama(tied))
    graph = fast.speculation.engine.runtime.verify
    fetched = [(node.args[0].target, layer_of(node), node.args[1]) for node in calls(graph.gm, offload.FETCH)]
    matrices = {name: p.nbytes for name, p in net.named_parameters() if "layers" in name and p.dim() == 2}
    assert sorted(fetched) == sorted((f"model.{name}", int(name.split(".")[2]), "cpu") for name in matrices)
    size = sum(matrices.values())
    assert f"{size / 1e9:.3f} GB in the host's memory, with {len(matrices)} fetches" in fast.speculation.explain()


def test_readers_in_a_layer_share_a_fetch():
    net = offload.without_hooks(accelerate.cpu_offload(llama(), CPU), fetches=True)
    graph = capture(net)
    before = calls(graph.gm, offload.FETCH)
    for node in before[:3]:  # another fetch of the weight, for one of its readers
        reader = next(iter(node.users))
        with graph.gm.graph.inserting_before(reader):
            again = graph.gm.graph.node_copy(node, lambda each: each)
        reader.replace_input_with(node, again)
    assert len(calls(graph.gm, offload.FETCH)) == len(before) + 3
    shared = passes.run(graph, passes.Settings(), [offload.share_fetches])
    assert len(calls(shared.gm, offload.FETCH)) == len(before)
    ids, positions = torch.arange(3, 9)[None], torch.arange(6)[None]
    assert torch.equal(shared.gm(ids, positions)[0], graph.gm(ids, positions)[0])


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_runs_out_of_memory():
    """The embedding of 34 MB has room, the head has none. Then nothing is pinned or on the GPU."""
    device, net = torch.device("cuda", 0), models.ADMITTED["llama"](vocab_size=1 << 17)
    ids, weights = models.prompts()[0][0].cuda(), {name: each.clone() for name, each in net.state_dict().items()}
    want = answer(copy.deepcopy(net).cuda(), ids)
    accelerate.cpu_offload(net, device, state_dict=weights)
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 50_000_000) / total, device)
    try:
        with pytest.raises(UnsupportedModelError, match=r"needs 0\.07 GB of cuda:0, which has run out of memory"):
            speculate(net, **QUICK)
        assert torch.cuda.memory_allocated(device) == before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert not any(each.is_pinned() for each in weights.values())
    assert answer(net, ids) == want
    fast = speculate(net)
    assert answer(fast, ids) == want
    assert weights["model.layers.0.mlp.up_proj.weight"].is_pinned()  # the host has it once


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layers, ends", [((0, "cpu"), 0), ((0, "disk"), 0), (("cpu", "disk"), "cpu")])
def test_on_a_gpu(layers, ends, tmp_path):
    """A part of a model on the host: its tokens in float32, by captured rounds."""
    want = answers_on(llama().to("cuda"))
    places = {name: (0 if name == "model.rotary_emb" else place) for name, place in device_map(layers, ends).items()}
    net = from_pretrained(llama(), tmp_path, device_map=places)
    fast = speculate(net)
    fast.speculation.warmup()
    assert answers_on(fast) == answers_on(net) == want
    assert calls(fast.speculation.engine.runtime.verify.gm, offload.FETCH)
    served = fast.speculation.original
    assert served.device == torch.device("cuda", 0)
    assert all(p.is_pinned() for p in served.parameters() if p.device.type == "cpu")
