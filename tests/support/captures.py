"""Models that differ in their weights alone are captured once a process, and the graph is bound to each one's weights.

Of two seconds that `speculate` takes with a tiny model, capture takes more than one. What no two models share (classes
of tests, adapters, hooks, quantised layers) is captured every time; so is what a test captures itself.
"""

import functools
import hashlib
import sys
from types import FunctionType, MethodType

import torch
from torch import nn

from spec_compile import api
from spec_compile.capture import trace
from spec_compile.capture.changes import _facts, config_reads
from spec_compile.drafters import dflash, draft_model, heads
from spec_compile.graph import ModelGraph
from spec_compile.inventory import configs_of

SHARED = ("torch.nn.", "transformers.models.", "transformers.activations", "transformers.pytorch_utils")
SHARED += ("spec_compile.drafters.modules.", "spec_compile.contrib.")
ORIGIN = {"_name_or_path", "architectures", "dtype"}
"""Values of a configuration that tell what was loaded from where; its tensors and modules tell what is here."""
CONTENTS = "and no other contents"
"""The end of a fingerprint that tells the contents of all tensors, too."""
GRAPHS: dict[tuple, tuple[ModelGraph, list[set]]] = {}
"""By what a trace depends on: a graph, and the names that were read of each configuration."""


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def fingerprint(module: nn.Module) -> tuple | None:
    """All that a trace depends on, or None for a module that is captured every time."""
    parts, addresses, tensors, kept = [], {}, tensors_of(module), False
    if not {*map(type, tensors.values())} <= {torch.Tensor, nn.Parameter} or hasattr(module, "hf_quantizer"):
        return None
    for path, part in module.named_modules():
        facts = _facts(part)
        values = {name: x for name, x in facts.values.items() if name != "report" and not hasattr(x, "to_json_string")}
        kept |= any(isinstance(x, torch.Tensor) for x in values.values())
        values = {name: contents(x) if isinstance(x, torch.Tensor) else x for name, x in values.items()}
        plain = not any(isinstance(x, FunctionType | MethodType) for x in values.values())
        if not type(part).__module__.startswith(SHARED) or facts.hooks or not plain or "forward" in vars(part):
            return None
        config = getattr(part, "config", None)
        settings = None if config is None else (config._attn_implementation, _settings(config.to_dict()))
        kind = type(part)
        if getattr(sys.modules[kind.__module__], kind.__name__, None) is not kind:  # made of others for this model
            kind = kind.__bases__
        parts.append((path, kind, facts.forward, repr(values), settings))
    is_mixed = len({x.requires_grad for x in module.parameters()}) > 1  # kinds of layers may differ in it
    for name, x in tensors.items():
        address = addresses.setdefault(x.data_ptr(), name)
        parts.append((name, type(x), x.shape, x.stride(), x.dtype, x.device, is_mixed and x.requires_grad, address))
    if kept:  # a capture computes others of it, as an encoder-decoder's keys of its example source
        parts += [*map(contents, tensors.values()), CONTENTS]
    return tuple(parts)


def contents(x: torch.Tensor) -> tuple:
    """A tensor as a value."""
    return x.shape, x.dtype, hashlib.sha256(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).digest()


def _settings(values: dict) -> str:
    """The values of a configuration, without its `ORIGIN`."""
    return repr(sorted((name, repr(value)) for name, value in values.items() if name not in ORIGIN))


def bound(graph: ModelGraph, module: nn.Module, prefix: str) -> ModelGraph:
    """A copy of a graph that reads the tensors of `module`, and copies of those that the capture computed."""
    graph, tensors = graph.copy(), tensors_of(module)
    for target in {node.target for node in graph.gm.graph.nodes if node.op == "get_attr"}:
        path, _, name = target.rpartition(".")
        owner, tensor = graph.gm.get_submodule(path), tensors.get(target.removeprefix(prefix))
        tensor = getattr(owner, name).clone() if tensor is None else tensor
        delattr(owner, name)
        is_parameter = isinstance(tensor, nn.Parameter)
        owner.register_parameter(name, tensor) if is_parameter else owner.register_buffer(name, tensor)
    return graph


def once(capture, prefix: str):
    """`capture`, whose graphs name tensors by `prefix` and the name in the module, once a fingerprint."""

    @functools.wraps(capture)
    def cached(module, *arguments):
        key = fingerprint(module), prefix, any(arguments) and arguments  # the default is none, or False
        if key in GRAPHS:
            graph, names = GRAPHS[key]
            with config_reads(configs_of(module)) as reads:
                configs = [config for config, _ in reads]
            for config, read in zip(configs, names):  # as a trace does, and `Watch` learns
                for name in read:
                    getattr(config, name, None)
            return bound(graph, module, prefix)
        with config_reads(configs_of(module)) as reads:
            graph = capture(module, *arguments)
        read = {node.target.removeprefix(prefix) for node in graph.gm.graph.nodes if node.op == "get_attr"}
        if key[0] and (key[0][-1] == CONTENTS or read <= tensors_of(module).keys()):
            GRAPHS[key] = graph.copy(), [names for _, names in reads]
        return graph

    return cached


capture = once(trace.capture, "model.")
"""For tests of what is made of a graph; those of capture itself take the original."""


def share() -> None:
    """Captures of `speculate` from now on."""
    for module in (api, draft_model):
        module.capture = capture
    for module in (heads, dflash):
        module.capture_head = once(module.capture_head, "")
