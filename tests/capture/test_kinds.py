"""Layers of one kind are traced once: the graph is that of a trace of all layers, or each layer is traced."""

import re
import types

import models
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import spec_compile
from spec_compile import UnsupportedModelError
from spec_compile.capture import kinds, trace
from spec_compile.capture.changes import config_reads
from spec_compile.capture.trace import capture
from spec_compile.inventory import configs_of

LISTS = "layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types", "indexer_types"
ROWS = {**models._ADMITTED, **{name: models._HYBRID[name] for name in models.HYBRIDS}}
ROWS |= {name: models._INDEXED[name] for name in models.INDEXED.keys() - {"dots3_note"}}  # which keeps functions
LONG_PATTERNS = {"bailing_hybrid", "gemma3", "olmo3", "cohere2", "nemotron_h", "lfm3", "glm_moe_dsa", "hy_v4"}
"""Models whose layers repeat after three or four."""
NOT_BUILT = {"zamba", "zamba2"}
"""Models whose configuration wants lists that belong together. Their layers share modules."""


def deep(name, depth=8, **config):
    """A tiny model of `models` with more layers, whose lists by layer are repeated."""
    config_class, cls, kwargs, *rest = ROWS[name]
    kwargs = {**kwargs, ("n_layer" if "n_layer" in kwargs else "num_hidden_layers"): depth}
    kwargs |= {key: (kwargs[key] * depth)[:depth] for key in LISTS if key in kwargs}
    if "index_topk" in kwargs:
        kwargs["index_topk"] = depth  # a smaller one would be taken for the number of a layer
    if "layers_block_type" in kwargs:
        del kwargs["num_hidden_layers"]
    return models.build(config_class, cls, {**kwargs, **config}, *rest)


def why_whole(model):
    """The reason why all layers are captured; None if a few of each kind are."""
    try:
        kinds.repeats_of(model)
    except kinds.UnlikeLayersError as reason:
        return str(reason)
    return None


def rows(graph):
    """A line for each node: all of it but its name. Symbols of sizes are named in the order in which they occur."""
    index, symbols = {node: number for number, node in enumerate(graph.gm.graph.nodes)}, {}
    lines = []
    for node in index:
        args = repr(torch.fx.map_arg((node.args, node.kwargs), lambda each: f"%{index[each]}"))
        value = re.sub(r"\bs\d+\b", lambda s: symbols.setdefault(s[0], f"S{len(symbols)}"), kinds._value(node))
        stack = [(key, *module) for key, module in (node.meta.get("nn_module_stack") or {}).items()]
        lines.append((node.op, str(node.target), args, value, stack))
    return lines


def tensors(graph):
    return dict([*graph.gm.named_parameters(remove_duplicate=False), *graph.gm.named_buffers(remove_duplicate=False)])


def assert_equal(graph, whole):
    """Node for node, field for field, tensor for tensor, but for the buffers that each trace makes for Zaya."""
    for number, (got, expected) in enumerate(zip(rows(graph), rows(whole), strict=True)):
        assert got == expected, f"node {number}"
    for field in whole.__dataclass_fields__.keys() - {"gm", "log", "traced_layers"}:
        assert getattr(graph, field) == getattr(whole, field), field
    got, expected = tensors(graph), tensors(whole)
    assert [*got] == [*expected]
    for name in got:
        is_made = name.endswith("qkv_proj.delays")
        assert torch.equal(got[name], expected[name]) if is_made else got[name] is expected[name], name


def check_graph(model, graph):
    """The graph computes what the model computes."""
    ids = torch.randint(3, models.VOCAB, (2, 21))
    with torch.no_grad():
        got, want = graph.gm(ids, torch.arange(21).expand_as(ids))[0], model(input_ids=ids, use_cache=False).logits
    assert (got - want).abs().max() < 1e-3 * want.std()


@pytest.mark.sweep("smollm3")
@pytest.mark.parametrize("name", sorted(ROWS.keys() - NOT_BUILT))
def test_equal_to_a_trace_of_all_layers(name):
    model = deep(name, 16 if name in LONG_PATTERNS else 8)
    with config_reads(configs_of(model)) as reads:
        graph = capture(model)
    with config_reads(configs_of(model)) as expected_reads:
        whole = capture(model, whole=True)
    assert 0 < graph.traced_layers <= kinds.WORTH * graph.decoder_layers and whole.traced_layers == 0
    assert why_whole(model) is None
    assert_equal(graph, whole)
    assert [names for _, names in expected_reads] <= [names for _, names in reads]


@pytest.mark.parametrize(
    "pattern, kept",
    [
        ("aaaaaaaa", [0, 1, 2, 7]),
        ("abbbbbbb", [0, 1, 2, 7]),
        ("ababababab", [0, 1, 2, 3, 8, 9]),
        ("aaabbabababababa", [0, 1, 2, 3, 4, 5, 14, 15]),
        ("abcabcabcabcabcabc", [0, 1, 2, 3, 4, 17]),
        ("aaaaaaaabbbbbbbbb", [0, 1, 2, 8, 9, 16]),
        ("aaaaabaaaaabaaaaab", [0, 1, 2, 5, 6, 17]),  # Gemma 3
        ("abcdefgh", None),
        ("aaaa", None),
        ("abababab", [0, 1, 2, 3, 6, 7]),
        ("", None),
    ],
)
def test_the_fewest_templates(pattern, kept):
    """A template follows a layer of the same kind in the copy as each of its layers does in the model."""
    numbers = [ord(letter) for letter in pattern]
    if kept is None:
        with pytest.raises(kinds.UnlikeLayersError, match="too few repeat"):
            kinds._templates("model.layers", numbers)
        return
    found = kinds._templates("model.layers", numbers)
    assert found.kept == kept and found.kinds == [numbers[number] for number in kept]
    assert [found.source[number] for number in kept] == [*range(len(kept))]
    for number, template in enumerate(found.source[1:], 1):
        assert [found.kinds[template - 1], found.kinds[template]] == numbers[number - 1 : number + 1]
        assert template > 1 or number == 1


def test_the_copy_is_numbered_from_0():
    """Lists by layer have the entries of the layers in the copy, also if an attribute names the last layer."""
    types = [models.WIN, *[models.WIN, models.FULL] * 5, models.FULL]
    model = deep("gemma2", 12, layer_types=types)
    repeats = kinds.repeats_of(model)
    copied = kinds.copy_of(model, repeats)
    assert repeats.kept == [0, 1, 2, 3, 10, 11] and copied.config.num_hidden_layers == 6
    assert copied.config.layer_types == [types[number] for number in repeats.kept]
    assert [int(layer.self_attn.layer_idx) for layer in copied.model.layers] == [*range(6)]
    assert copied.model.layers[5].mlp.up_proj.weight is model.model.layers[11].mlp.up_proj.weight


def layer(net, number=4):
    return net.model.layers[number]


def parameter(tensor):
    return nn.Parameter(tensor.detach())


def halved(module, args, *output):
    return (output or args)[0] * 0.5


class Halved(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 0.5


def other_sizes(net):
    mlp = layer(net).mlp
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(64, 80), nn.Linear(64, 80), nn.Linear(80, 64)


def own_forward(net):
    mlp = layer(net).mlp
    mlp.forward = types.MethodType(lambda self, x: 0.5 * type(self).forward(self, x), mlp)


def tensor_in_each_layer(net):
    for number, each in enumerate(net.model.layers):
        each.mlp.factor = torch.tensor(1 + 0.1 * number)


def numbered(name, first):
    """A change: an attribute of the MLPs counts the layers."""
    return lambda net: [setattr(each.mlp, name, number) for number, each in enumerate(net.model.layers, first)]


def put(path, name, make):
    """A change: the part of a net at a path has another attribute, made of the net."""
    return lambda net: setattr(net.get_submodule(path), name, make(net))


NORM, MLP = "model.layers.4.input_layernorm", "model.layers.4.mlp"
FEW, SHARED, HOOKED = "too few repeat", "share modules or weights", r"has a hook \(model.layers.4.mlp\)"
OWN = r"has a forward of its own \(model.layers.4.mlp\)"
CHANGES = {
    "attribute": (put("model.layers.5.self_attn", "scaling", lambda net: 0.11), None),
    "eps": (put(NORM, "variance_epsilon", lambda net: 0.5), FEW),
    "hook": (lambda net: layer(net).mlp.register_forward_hook(halved), HOOKED),
    "hook before": (lambda net: layer(net).mlp.register_forward_pre_hook(halved), HOOKED),
    "dtype": (put(NORM, "weight", lambda net: parameter(layer(net).input_layernorm.weight.double())), FEW),
    "shape": (other_sizes, FEW),
    "bias": (put(f"{MLP}.up_proj", "bias", lambda net: nn.Parameter(torch.randn(96))), FEW),
    "stride": (
        put(f"{MLP}.up_proj", "weight", lambda net: parameter(layer(net).mlp.up_proj.weight.T.contiguous().T)), FEW,
    ),
    "tie between layers": (put(f"{MLP}.up_proj", "weight", lambda net: layer(net, 5).mlp.up_proj.weight), SHARED),
    "tie inside": (put(f"{MLP}.gate_proj", "weight", lambda net: layer(net).mlp.up_proj.weight), FEW),
    "tie with the norm": (put(NORM, "weight", lambda net: net.model.norm.weight), SHARED),
    "one module in two layers": (put("model.layers.2", "mlp", lambda net: layer(net, 5).mlp), SHARED),
    "one layer twice": (put("model.layers", "2", lambda net: layer(net, 5)), SHARED),
    "forward": (own_forward, OWN),
    "forward of another layer": (put(MLP, "forward", lambda net: layer(net, 6).mlp.forward), OWN),
    "activation": (put(MLP, "act_fn", lambda net: nn.ReLU()), FEW),
    "class": (put(MLP, "__class__", lambda net: Halved), FEW),
    "tensor in each layer": (tensor_in_each_layer, "no parameter or buffer"),
    "last layer": (lambda net: setattr(layer(net, -1).mlp, "act_fn", nn.ReLU()), None),
    "adapter": (put("", "peft_config", lambda net: {}), "has adapters"),
    "a list on the model": (put("model", "factors", lambda net: [0.1] * len(net.model.layers)), "as many values"),
    "an object that layers share": (put("model.layers.0.mlp", "memory", lambda net: object()), r"keeps a object \(.*y"),
    "numbers of layers": (numbered("layer_number", 0), None),
    "numbers from one": (numbered("layer_number", 1), FEW),
    "numbers by another name": (numbered("factor", 0), FEW),
}  # fmt: skip
"""Changes of a net, and the reason why each of its layers is captured then."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_reason_for_each_layer(name):
    model, (change, reason) = deep("llama", 7), CHANGES[name]
    assert why_whole(model) is None
    change(model)
    assert re.search(reason, why_whole(model)) if reason else why_whole(model) is None


CAPTURED = [
    "attribute", "eps", "bias", "tie between layers", "tie inside", "one layer twice", "activation", "class", "forward",
    "last layer",
]  # fmt: skip


@pytest.mark.sweep("attribute-8")
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_changed_layer_is_captured_right(name, depth):
    """With 16 layers, most of these have a pattern after the changed layer, which is in the copy."""
    model = deep("llama", depth)
    CHANGES[name][0](model)
    check_graph(model, capture(model))


class ByNumber(nn.Module):
    """Multiplies by a function of a number that it keeps."""

    def __init__(self, inner, function, number):
        super().__init__()
        self.inner, self.function, self.layer_idx = inner, function, number

    def forward(self, x):
        return self.inner(x) * self.function(self.layer_idx)


FUNCTIONS = {
    "arithmetic": lambda number: 1 + number,
    "comparison": lambda number: 2.0 if number < 4 else 1.0,
    "equality": lambda number: 2.0 if number in (3, 6) else 1.0,
    "conversion": lambda number: float(number),
    "remainder": lambda number: 1 + number % 2,
    "key": lambda number: dict(enumerate(range(1, 20)))[number],
    "text": lambda number: 1 + len(f"{number:3}".strip()),
    "tensor": lambda number: torch.arange(1.0, 20.0)[number],
}


@pytest.mark.sweep("tensor")
@pytest.mark.parametrize("use", FUNCTIONS)
def test_layers_that_compute_with_their_number(use, caplog):
    model = deep("llama")
    for number, layer in enumerate(model.model.layers):
        layer.mlp = ByNumber(layer.mlp, FUNCTIONS[use], number)
    with caplog.at_level("INFO", "spec_compile"):
        graph = capture(model)
    assert graph.traced_layers == 0 and "each of its layers is captured" in caplog.text
    check_graph(model, graph)


class Counts(nn.Module):
    """Multiplies in the call of one number since `begin`. Its state shows in no attribute of its own."""

    begin, calls = 0, [0]

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        Counts.calls[0] += 1
        return self.inner(x) * (0.5 if Counts.calls[0] % 8 == 6 else 1.0)


@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_unlike_layers_that_look_alike_are_captured_whole(check, caplog):
    """The check finds the difference; without a check, code that nobody knows is captured whole."""
    model = deep("llama")
    for layer in model.model.layers:
        layer.mlp = Counts(layer.mlp)
    Counts.calls[0] = 0
    assert why_whole(model) is None and not kinds.is_known(model)
    with caplog.at_level("INFO", "spec_compile"):
        fast = spec_compile.speculate(model, compile=False, check=check)
    assert ("are not alike" in caplog.text) == check
    assert fast.speculation.engine.runtime.verify.traced_layers == 0


def test_periods_that_differ_are_not_repeated():
    """Two nodes of the second period are exchanged by others."""
    model = deep("llama")
    repeats = kinds.repeats_of(model)
    copied = kinds.copy_of(model, repeats)
    copied.model.layers[2].mlp.act_fn = nn.ReLU()
    gm, _ = trace._trace_model(copied, model, torch.no_grad())
    with pytest.raises(kinds.UnlikeLayersError, match="differ in the operation relu"):
        kinds.Expansion(gm, model, repeats).graph_module()


@pytest.mark.parametrize("old, new, reason", [(1, 0, "read more than"), (2, 0, "differ in the operation")])
def test_layers_that_read_other_layers_are_not_repeated(old, new, reason):
    """A node of the last layer reads layer 1, or a node of layer 2 reads layer 0 in place of layer 1."""
    model = deep("llama")
    repeats = kinds.repeats_of(model)
    gm, _ = trace._trace_model(kinds.copy_of(model, repeats), model, torch.no_grad())
    silus = [node for node in gm.graph.nodes if node.target is torch.ops.aten.silu.default]
    products = [next(iter(silu.users)) for silu in silus]
    if old == 1:
        products[3].replace_input_with(silus[3], silus[1])
    else:
        products[2].replace_input_with(silus[2], silus[new])
    with pytest.raises(kinds.UnlikeLayersError, match=reason):
        kinds.Expansion(gm, model, repeats).graph_module()


@pytest.mark.sweep("copy_of")
@pytest.mark.parametrize("step", ["copy_of", "Expansion", "_describe"])
def test_nothing_is_left_on_the_model(step, monkeypatch, caplog):
    """Errors on the way, and a capture without errors."""

    def state():
        parts = {path: (part, {**vars(part)}.keys(), vars(part).get("layer_idx")) for path, part in net.named_modules()}
        return parts, {name: id(x) for name, x in net.state_dict(keep_vars=True).items()}, net.config.to_dict()

    net = deep("gemma2")
    before, real, fails = state(), getattr(trace, step), [True]

    def failing(*arguments):
        if fails.pop() if fails else False:
            raise RuntimeError("injected")
        return real(*arguments)

    monkeypatch.setattr(trace, step, failing)
    with caplog.at_level("INFO", "spec_compile"):
        graph = capture(net)
    assert graph.traced_layers == 0 and "injected" in caplog.text
    assert capture(net).traced_layers == 6
    assert state() == before and all(type(vars(part).get("layer_idx", 0)) is int for part in net.modules())


def test_a_model_that_fails_is_refused_as_before():
    model = deep("llama")

    class Data(nn.Module):
        def forward(self, x):
            return x * int(x.sum())

    for layer in model.model.layers:
        layer.mlp = Data()
    with pytest.raises(UnsupportedModelError, match="could not be captured as one graph"):
        capture(model)


def test_a_torch_without_the_option_of_stacks_traces_too(monkeypatch):
    """torch 2.11 has no ``torch.fx.config.do_not_emit_stack_traces``, and it has none after a trace."""
    monkeypatch.delattr(torch.fx.config, "do_not_emit_stack_traces")
    head = torch.nn.Linear(4, 4)
    trace._trace(head, torch.zeros(2, 3, 4))
    assert not hasattr(torch.fx.config, "do_not_emit_stack_traces")
