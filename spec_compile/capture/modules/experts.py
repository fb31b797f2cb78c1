"""Routed experts that do not call transformers' experts interface, made to call the two markers of experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.experts import DOWN, UP, ExpertFormat
from .attention import Attend


def aria(module: nn.Module, attend: Attend) -> None:
    """Weights [E, I, O], of which no kernel has a gate; before transformers 5.18 two modules had them."""
    experts, top = module.experts, module.router
    split = hasattr(experts, "fc1")
    first, second = (experts.fc1.weight, experts.fc2.weight) if split else (experts.gate_up_proj, experts.down_proj)
    count = experts.config.moe_topk if split else module.router.top_k

    def forward(hidden_states: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, 1)
        logits, ids = F.linear(rows, top.weight).topk(count, dim=-1)
        layout = ExpertFormat(transposed=True).text
        gate, up = UP(rows, ids, [first], layout).chunk(2, dim=-1)
        routed = DOWN(F.silu(gate) * up, ids, logits.softmax(dim=-1), [second], layout)
        return routed.view_as(hidden_states) + module.shared_experts(hidden_states)

    module.forward = forward


def dbrx(module: nn.Module, attend: Attend) -> None:
    """Gate and up are two weights, each [E * I, H] with the experts one after the other."""
    for name in ("w1", "v1", "w2"):
        weight = getattr(module.mlp, name).detach().unflatten(0, (module.num_experts, module.ffn_hidden_size))
        module.register_buffer(name, weight, persistent=False)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, 1)
        gate, up = (UP(rows, top_k_index, [weight], ExpertFormat().text) for weight in (module.w1, module.v1))
        x = module.mlp.activation_fn(gate) * up
        down = ExpertFormat(transposed=True).text
        return DOWN(x, top_k_index, top_k_weights, [module.w2], down).view_as(hidden_states)

    module.forward = forward


def longcat_flash(module: nn.Module, attend: Attend) -> None:
    """The experts numbered after the routed ones return their input."""
    if module.gate_up_proj is None:
        return

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        is_routed = top_k_index < module.num_routed_experts
        ids, weights = torch.where(is_routed, top_k_index, 0), torch.where(is_routed, top_k_weights, 0)
        x = UP(hidden_states, ids, [module.gate_up_proj], ExpertFormat(gate="silu").text)
        kept = hidden_states * (top_k_weights - weights).sum(dim=-1, keepdim=True)
        return DOWN(x, ids, weights, [module.down_proj], ExpertFormat().text) + kept.to(hidden_states.dtype)

    module.forward = forward
