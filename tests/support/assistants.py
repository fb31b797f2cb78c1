"""Tiny targets of Gemma 4 with assistants that draft well, and what transformers' own generator drafts with them."""

import copy
import functools

import models
import torch
import transformers
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from spec_compile.drafters.trees.grow import grow

V, H, WINDOW = models.VOCAB, 64, 8
SHARING = dict(num_kv_shared_layers=2, hidden_size_per_layer_input=16)
DENSE = dict(attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0)
EXPERTS = DENSE | dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32)
UNIFIED = dict(attention_k_eq_v=True, num_global_key_value_heads=1)
SIZES = {"E2B": SHARING, "E4B": SHARING | dict(num_kv_shared_layers=3), "31B": DENSE, "26B-A4B": EXPERTS}
"""By the models that are built so: keys that layers share and embeddings of each layer, keys as values, experts."""
if hasattr(transformers, "Gemma4UnifiedAssistantConfig"):
    SIZES["12B"] = UNIFIED
CLUSTERED = {"E2B", "E4B"}  # the models whose assistants choose among clusters of tokens


def _of(name, kind):
    """transformers' class of this kind for a model."""
    return getattr(transformers, f"Gemma4{'Unified' if name == '12B' else ''}{kind}")


def _text_config(name, layers, **options):
    common = dict(
        hidden_size=H, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=V,
        global_head_dim=32, sliding_window=WINDOW, max_position_embeddings=512, initializer_range=0.2, pad_token_id=0,
        eos_token_id=None, bos_token_id=None, num_hidden_layers=layers, tie_word_embeddings=False,
        layer_types=([models.WIN] * 2 + [models.FULL]) * (layers // 3),
        **{} if name == "12B" else dict(vocab_size_per_layer_input=V),
    )  # fmt: skip
    return _of(name, "TextConfig")(**common | options)


def _damp(model):
    """Let layers change little, so that the token before nearly decides the next."""
    for layer in model.get_decoder().layers:
        for name, part in layer.named_children():
            if name.startswith("post_") and name.endswith("norm"):
                part.weight.data.mul_(0.1)


@functools.cache
@torch.no_grad()
def target(name):
    """12B is built as it is published, as a part of a model that reads pictures and sound."""
    torch.manual_seed(0)
    text, kind = _text_config(name, 6, **SIZES[name]), "ForCausalLM"
    if name == "12B":
        pictures = dict(mm_embed_dim=H, mm_posemb_size=8, output_proj_dims=H, patch_size=2)
        sound, kind = dict(audio_embed_dim=16), "ForConditionalGeneration"
        text = transformers.Gemma4UnifiedConfig(
            text_config=text, vision_config=pictures, audio_config=sound, tie_word_embeddings=False
        )
    model = _of(name, kind)(text).eval()
    _damp(model)
    return model


@functools.cache
@torch.no_grad()
def assistant(name, seed=1):
    """Three layers over the target's keys, and the target's output matrix."""
    torch.manual_seed(seed)
    model, layers = target(name), 3
    none = dict(num_kv_shared_layers=layers)
    none |= {} if name == "12B" else dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    dense = {key: SIZES[name][key] for key in ("attention_k_eq_v", "num_global_key_value_heads") if key in SIZES[name]}
    config = _of(name, "AssistantConfig")(
        text_config=_text_config(name, layers, **dense | none), backbone_hidden_size=H, tie_word_embeddings=False,
        use_ordered_embeddings=name in CLUSTERED, num_centroids=12, centroid_intermediate_top_k=6,
    )  # fmt: skip
    made = _of(name, "AssistantForCausalLM")(config).eval()
    _damp(made)
    made.pre_projection.weight.copy_(torch.cat([torch.eye(H), 0.1 * torch.randn(H, H)], dim=1))
    made.lm_head.weight.copy_(model.lm_head.weight)
    if name in CLUSTERED:
        order = torch.randperm(V)
        made.masked_embedding.token_ordering.copy_(order)
        made.masked_embedding.centroids.weight.copy_(made.lm_head.weight[order].view(12, -1, H).mean(dim=1))
    return made


def _outputs(name, ids):
    return target(name)(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)


@torch.no_grad()
def drafted(name, text, steps):
    """The chain after `text` by transformers' generator, which gets the target's keys of all of it but the last."""
    model, ids = target(name), torch.tensor([text])
    drafter = copy.copy(assistant(name))
    drafter.generation_config = copy.deepcopy(drafter.generation_config)
    drafter.generation_config.num_assistant_tokens = steps
    config = copy.deepcopy(model.generation_config)
    config.max_length = 1000
    generator = SinglePositionMultiTokenCandidateGenerator(drafter, model.get_input_embeddings(), config)
    ids, _ = generator.get_candidates(
        ids, model_kwargs={}, model_outputs=_outputs(name, ids[:, :-1]), is_first_iteration=False, n_last_matches=0
    )
    return ids[0, len(text) :].tolist()


@torch.no_grad()
def grown(name, text, schedule):
    """Tokens and parents of the tree after `text`, each node by transformers' forward of the assistant."""
    ids, model = torch.tensor([text]), target(name)
    outputs = _outputs(name, ids[:, :-1])

    def step(tokens, hidden, ancestors, depth, offset, wanted):
        states, logits = [], []
        for node in range(tokens.shape[1]):
            joined = [model.get_input_embeddings()(tokens[:, node : node + 1]), hidden[:, node : node + 1]]
            out = assistant(name)(
                inputs_embeds=torch.cat(joined, dim=-1), position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=dict(outputs.shared_kv_states), use_cache=False,
            )  # fmt: skip
            states.append(out.last_hidden_state)
            absent = (out.logits == out.logits.min()) & (name in CLUSTERED)  # transformers' number outside the clusters
            logits.append(out.logits.masked_fill(absent, float("-inf")))
        return torch.cat(states, dim=1), torch.cat(logits, dim=1)[:, -wanted:]

    hidden, logits = step(ids[:, -1:], outputs.hidden_states[-1][:, -1:], None, None, 0, 1)
    tokens, parents, _ = grow(schedule, ids[:, -1], logits[:, 0], hidden[:, 0], step)
    return tokens[0].tolist(), parents[0].tolist()
