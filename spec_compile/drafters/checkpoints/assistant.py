"""Gemma 4's assistants, as transformers names their tensors: `modules.assistant.Assistant` from files or a model."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...capture.copies import shared_copy
from ...inventory import set_in_configs
from ..modules.assistant import Assistant, ClusteredHead
from ..modules.mtp import IMPLEMENTATION
from .config import INVALID, invalid
from .draft_files import DraftFiles
from .files import Checkpoint, Target, TensorSources

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
PUBLISHED = {"layers.": "model.layers.", "norm.": "model.norm.", "clusters.": "masked_embedding."}
"""Beginnings of our names -> of the published ones, where they differ."""
EMBEDDING, HEAD, ORDERING = "model.embed_tokens.weight", "lm_head.weight", "masked_embedding.token_ordering"
KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")


def is_assistant(files: DraftFiles) -> bool:
    """True if the config is that of an assistant."""
    return files.config.get("model_type") in MODEL_TYPES


def read_assistant(files: DraftFiles, target: Target, overrides: dict) -> Assistant:
    """The assistant in `files`. ValueError if it is for another target, or if its tensors do not fit."""
    try:
        config = AutoConfig.for_model(**files.config)
        with torch.device("meta"):
            draft = AutoModelForCausalLM.from_config(config, dtype=target.embedding.dtype)
    except INVALID as error:
        raise invalid(error) from error
    assistant, checkpoint = _made_of(draft, target), files.checkpoint
    with torch.device(target.embedding.device):
        assistant.rotary_emb = type(assistant.rotary_emb)(draft.model.config)  # not in checkpoints
    head = HEAD if HEAD in checkpoint and not (config.tie_word_embeddings and EMBEDDING in checkpoint) else EMBEDDING
    checkpoint.ignore(EMBEDDING if head == HEAD else HEAD, "tokens are embedded by the target, or it is the same")
    for number in range(len(assistant.layers)):
        for norm_or_product in KEYS:
            name = f"model.layers.{number}.self_attn.{norm_or_product}.weight"
            checkpoint.ignore(name, "the layer reads the target's keys and values")
    if assistant.clusters is not None:
        assistant.clusters.token_ordering = _ordering(checkpoint, target)

    def sources_of(name: str, shape: tuple[int, ...]) -> TensorSources:
        ours = next((start for start in PUBLISHED if name.startswith(start)), "")
        return TensorSources(
            [head if name == "head_weight" else PUBLISHED.get(ours, "") + name.removeprefix(ours)], shape
        )

    checkpoint.fill(assistant, sources_of, target.embedding)
    assistant.report[:0] = [f"assistant of {config.model_type} from {files.draft}"]
    assistant.report += checkpoint.ignored
    return assistant.eval()


def wrap_assistant(draft: nn.Module, target: Target) -> Assistant:
    """An assistant of transformers that is loaded already; its tensors are shared. TypeError for any other module,
    ValueError if it is for another target."""
    if not isinstance(draft, PreTrainedModel) or draft.config.model_type not in MODEL_TYPES:
        raise TypeError(
            f"draft: expected a path, a repository of the hub or an assistant of transformers "
            f"({', '.join(MODEL_TYPES)}), got {type(draft).__name__}"
        )
    assistant = _made_of(shared_copy(draft), target)
    assistant.report[:0] = [f"assistant: {type(draft).__name__}"]
    return assistant.requires_grad_(False).eval()


def _made_of(draft: PreTrainedModel, target: Target) -> Assistant:
    """The assistant over the tensors of `draft`, whose configs change."""
    config, sources = draft.config, _sources(draft, target)
    clusters = None
    if config.use_ordered_embeddings:
        if target.vocab_size % config.num_centroids:
            raise ValueError(
                f"draft: its config has num_centroids {config.num_centroids}, which do not divide its "
                f"{target.vocab_size} tokens"
            )
        embedder = draft.masked_embedding
        clusters = ClusteredHead(embedder.centroids, embedder.token_ordering, config.centroid_intermediate_top_k)
    decoder = draft.model
    set_in_configs(decoder, "_attn_implementation", IMPLEMENTATION)
    assistant = Assistant(
        decoder.layers, decoder.norm, decoder.rotary_emb, target.model.get_input_embeddings(), draft.pre_projection,
        draft.post_projection, draft.lm_head.weight, clusters, sources,
    )  # fmt: skip
    read = ", ".join(str(source) for source, _, _ in sources)
    scored = "" if clusters is None else f", for the tokens of {clusters.chosen} of {config.num_centroids} clusters"
    assistant.report = [
        f"{len(sources)} layers read the keys and values of the target's layers {read}",
        f"embedding: the target's; output matrix: its own{scored}",
    ]
    return assistant


def _sources(draft: PreTrainedModel, target: Target) -> tuple[tuple[int, int, int], ...]:
    """`Assistant.sources`: the last of the target's layers of each kind that computes keys and values.

    Kinds [sliding, full, sliding, full, sliding, full], the last two of which share keys: sliding layers of the
    assistant read layer 2, full ones layer 3.
    """
    target.check(draft.config.backbone_hidden_size, draft.config.get_text_config().vocab_size)
    name, decoder = type(target.model).__name__, target.model.get_decoder()
    layers = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    if not layers or not all(hasattr(layer, "layer_type") and hasattr(layer, "is_kv_shared_layer") for layer in layers):
        raise ValueError(f"draft: it reads the keys and values of Gemma 4; {name} has other layers")
    own = {layer.layer_type: number for number, layer in enumerate(layers) if not layer.is_kv_shared_layer}
    sources = []
    for number, layer in enumerate(draft.model.layers):
        reader, kind = layer.self_attn, layer.self_attn.layer_type
        if kind not in own:
            raise ValueError(f"draft: its layer {number} reads a layer of {kind}, {name} has none; {TAKE}")
        wanted, given = _heads(reader), _heads(layers[own[kind]])
        if wanted != given:
            raise ValueError(
                f"draft: its layer {number} reads {wanted[0]} heads of {wanted[1]}, layer {own[kind]} of {name} has "
                f"{given[0]} heads of {given[1]}; {TAKE}"
            )
        sources.append((own[kind], *given))
    return tuple(sources)


TAKE = "take the assistant of this model"


def _heads(attention: nn.Module) -> tuple[int, int]:
    """The KV heads of an attention layer and the size of a head."""
    return attention.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


def _ordering(checkpoint: Checkpoint, target: Target) -> torch.Tensor:
    """The tokens by cluster [V] int64; ValueError unless each is there once."""
    ordering = checkpoint.take(ORDERING, (target.vocab_size,)).long()
    if not torch.equal(ordering.sort().values, torch.arange(target.vocab_size)):
        raise ValueError(f"draft: {ORDERING} in {checkpoint.source} must name each of {target.vocab_size} tokens once")
    return ordering.to(target.embedding.device)
