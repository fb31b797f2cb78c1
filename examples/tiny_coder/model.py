"""The demo model for training: the arithmetic and parameter names of transformers' LlamaForCausalLM."""

from __future__ import annotations

import math

import data
import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 768, 8, 4, 2, 64
THETA, EPS, LENGTH = 10000.0, 1e-5, data.MAX_LENGTH


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda i, o: nn.Linear(i, o, bias=False)  # noqa: E731
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(HIDDEN, HEADS * HEAD_DIM),
                "k_proj": linear(HIDDEN, KV_HEADS * HEAD_DIM),
                "v_proj": linear(HIDDEN, KV_HEADS * HEAD_DIM),
                "o_proj": linear(HEADS * HEAD_DIM, HIDDEN),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(HIDDEN, INTERMEDIATE),
                "up_proj": linear(HIDDEN, INTERMEDIATE),
                "down_proj": linear(INTERMEDIATE, HIDDEN),
            }
        )

    def forward(self, x, cos, sin):
        rows, length, _ = x.shape
        att, mlp = self.self_attn, self.mlp

        def heads(y, n):
            return y.view(rows, length, n, HEAD_DIM).transpose(1, 2)

        def rotate(y):
            half = torch.cat((-y[..., HEAD_DIM // 2 :], y[..., : HEAD_DIM // 2]), dim=-1)
            return (y * cos + half * sin).to(y.dtype)

        h = self.input_layernorm(x)
        q = rotate(heads(att["q_proj"](h), HEADS))
        k = rotate(heads(att["k_proj"](h), KV_HEADS)).repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = heads(att["v_proj"](h), KV_HEADS).repeat_interleave(HEADS // KV_HEADS, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + att["o_proj"](out.transpose(1, 2).reshape(rows, length, HIDDEN))
        h = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))


def head_loss(x, weight, labels):
    """labels: tokens [B, T], or logits of a teacher [B, T, V]."""
    logits = F.linear(x, weight).float().flatten(0, 1)
    labels = labels.flatten(0, 1)
    return F.cross_entropy(logits, labels.float().softmax(-1) if labels.ndim == 2 else labels)


class Llama(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.embed_tokens = nn.Embedding(data.VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)
        freq = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angle = torch.outer(torch.arange(LENGTH).float(), freq).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.head_loss = head_loss
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = 0.02 if "embed" in name else p.shape[1] ** -0.5
                if "o_proj" in name or "down_proj" in name:
                    scale /= math.sqrt(2 * layers)
                nn.init.normal_(p, std=scale)

    def forward(self, tokens, teacher=None):
        """The loss over tokens [B, T + 1], against what follows or against a teacher's logits [B, T, V]."""
        ids, labels = tokens[:, :-1], tokens[:, 1:] if teacher is None else teacher
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head_loss(self.norm(x), self.embed_tokens.weight, labels)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates, batched over matrices of one shape; the update has AdamW's size."""

    def __init__(self, params, lr, weight_decay, momentum=0.95):
        by_shape: dict = {}
        for p in params:
            by_shape.setdefault(tuple(p.shape), []).append(p)
        groups = [{"params": ps} for ps in by_shape.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            grads = torch.stack([p.grad for p in params])
            state = self.state[params[0]]
            if not state:
                state["momentum"] = torch.zeros_like(grads)
            buf = state["momentum"].lerp_(grads, 1 - group["momentum"])
            x = grads.lerp(buf, group["momentum"])
            x = x.bfloat16() if x.is_cuda else x
            tall = x.shape[1] > x.shape[2]
            x = x.mT if tall else x
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):  # Newton-Schulz iteration towards the nearest orthogonal matrix
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
            x = x.mT if tall else x
            size = 0.2 * math.sqrt(max(x.shape[1:]))
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, list(x.to(grads.dtype).unbind(0)), alpha=-group["lr"] * size)


def to_transformers(model):
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=data.VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=len(model.layers),
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, rms_norm_eps=EPS,
        max_position_embeddings=LENGTH, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": THETA}, dtype="bfloat16",
    )  # fmt: skip
    hf = LlamaForCausalLM(config)
    hf.model.load_state_dict({k: v.float().cpu() for k, v in model.state_dict().items()})
    hf.tie_weights()
    hf = hf.to(torch.bfloat16).eval()
    hf.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return hf
