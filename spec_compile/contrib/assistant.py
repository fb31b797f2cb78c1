"""Gemma 4's assistants: a few decoder layers whose queries read the target's own keys and values.

A forward joins the embedding of a token with the target's state before it, or with the assistant's output for the draft
before it. Its layers compute no keys: each reads the keys of the target's last layer of its kind, full or
sliding, that computes any. All nodes of a tree are drafted at the position of the root and see the committed slots, not
each other: a node's draft depends on the tokens above it only by the state that the assistant passes on. So a forward
takes one level of a tree.

Shapes: B rows, R nodes, h the target's hidden size, H the assistant's, V the vocabulary.
"""

import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .. import passes
from ..capture.admit import Inventory
from ..capture.copies import shared_copy
from ..capture.trace import capture_head
from ..compile.part import PartCompiler
from ..compile.regions import compile_regions
from ..compile.start import draft_graph
from ..drafters import ALGORITHMS, Entry
from ..drafters.checkpoints.config import valid
from ..drafters.checkpoints.draft_files import RENAMES, DraftFiles, open_files
from ..drafters.checkpoints.files import Target
from ..drafters.checkpoints.load import DraftFormat, load_head, register_format
from ..drafters.modules.dflash import is_dflash, is_loaded_dflash
from ..drafters.modules.mtp import IMPLEMENTATION
from ..drafters.options import DraftOptions
from ..drafters.shared_draft import DraftHead, DraftWeights, keep_row
from ..drafters.trees.propose import propose_grown
from ..drafting import Algorithm, Drafter, DraftPlan
from ..errors import UnsupportedModelError
from ..graph import ModelGraph, calls
from ..inventory import set_in_configs
from ..kernels.attention.backends import attend_to_committed, load_triton
from ..kernels.ops import arguments_of
from ..parallel.ranks import ALONE
from ..passes.apply import replace_node
from ..passes.outputs import FINAL
from ..passes.use_cache import use_tree_attention
from ..runtime.state import State
from ..tree import Accepted

# The module


def clustered_logits(x: Tensor, head_weight: Tensor, clusters: nn.Module) -> Tensor:
    """Logits [B, R, V] of x [B, R, H] for the tokens of a few clusters: those whose centroids fit the state best.

    They are minus infinity for other tokens; only the rows of `head_weight` [V, H] of these tokens are read.
    clusters: the module of transformers, whose token_ordering [V] has the tokens of the first cluster, of the second,
        and so on: V / clusters each. [3, 0, 2, 1] and two clusters: the second has the tokens 2 and 1.
    """
    chosen = clusters.centroids(x).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
    members = clusters.token_ordering.view(clusters.centroids.out_features, -1)
    tokens = members[chosen].flatten(2)  # [B, R, scored]
    scores = (F.embedding(tokens, head_weight) @ x[:, :, :, None])[:, :, :, 0]
    everywhere = scores.new_full((*x.shape[:2], head_weight.shape[0]), float("-inf"))
    return everywhere.scatter(2, tokens, scores)


class Assistant(nn.Module):
    """An assistant over the tensors of a model of transformers, in the form in which it is captured.

    model: the layers' attention is ``spec_compile::attention``; its pre_projection leads from [h of the embedding; h of
        the state] to H, its post_projection from H to h, and its output matrix [V, H] is `head_weight`.
        If it has clusters, only some tokens are scored (see `clustered_logits`).
    embed_tokens: the target's input embedding, a module.
    sources: for each layer the target's layer whose keys and values it reads, their KV heads and the size of a head.
    """

    taps = (FINAL,)

    def __init__(self, model: PreTrainedModel, embed_tokens: nn.Module, sources: tuple[tuple[int, int, int], ...]):
        super().__init__()
        decoder, self.embed_tokens = model.model, embed_tokens
        self.blocks, self.norm, self.rotary_emb = decoder.layers, decoder.norm, decoder.rotary_emb
        self.pre_projection, self.post_projection = model.pre_projection, model.post_projection
        self.head_weight, self.clusters, self.sources = model.lm_head.weight, model.masked_embedding, sources
        self.hidden_size = self.post_projection.out_features
        self.report: list[str] = []

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids, positions [B, R] int64, state [B, R, h] -> (recycled [B, R, h], normed [B, R, H]).

        recycled: the state for the next draft.
        normed: the factor of `head_weight`.

        The keys and values in the trace are zeros, in whose place `read_target` puts the target's cache.
        """
        x = self.pre_projection(torch.cat([self.embed_tokens(input_ids), state], dim=-1))
        for layer, (_, kv_heads, size) in zip(self.blocks, self.sources):
            kind, absent = layer.self_attn.layer_type, x.new_zeros(x.shape[0], kv_heads, x.shape[1], size)
            x = layer(
                x, shared_kv_states={kind: (absent, absent)}, attention_mask=None, position_ids=positions,
                position_embeddings=self.rotary_emb(x, positions, kind),
            )  # fmt: skip
        normed = self.norm(x)
        return self.post_projection(normed), normed


# Its checkpoints


MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
EMBEDDING, HEAD, ORDERING = "model.embed_tokens.weight", "lm_head.weight", "masked_embedding.token_ordering"
TAKE = "take the assistant of this model"


def is_assistant(files: DraftFiles) -> bool:
    """True if the config says assistant."""
    return files.config.get("model_type") in MODEL_TYPES


def read_assistant(files: DraftFiles, target: Target, overrides: dict) -> Assistant:
    """The assistant in `files`. ValueError if it is for another target, or if its tensors do not fit."""
    with valid(), torch.device("meta"):
        config = AutoConfig.for_model(**files.config)
        model = AutoModelForCausalLM.from_config(config, dtype=target.embedding.dtype)
    assistant = _made_of(model, target, f"assistant of {config.model_type} from {files.draft}")
    checkpoint = files.checkpoint
    with torch.device(target.embedding.device):
        assistant.rotary_emb = type(assistant.rotary_emb)(model.model.config)  # not in checkpoints
    # Leave out what the target has, or its layers.
    is_tied = config.tie_word_embeddings and EMBEDDING in checkpoint.shapes
    head = HEAD if HEAD in checkpoint.shapes and not is_tied else EMBEDDING
    checkpoint.ignore(EMBEDDING if head == HEAD else HEAD, "tokens are embedded by the target, or it is the same")
    for number in range(len(assistant.blocks)):
        for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
            name = f"model.layers.{number}.self_attn.{part}.weight"
            checkpoint.ignore(name, "the layer reads the target's keys and values")
    if assistant.clusters is not None:
        ordering = checkpoint.take(ORDERING, (target.vocab_size,)).long()
        if not torch.equal(ordering.sort().values, torch.arange(target.vocab_size)):
            raise ValueError(f"draft: {ORDERING} in {files.draft} must name each of {target.vocab_size} tokens once")
        assistant.clusters.token_ordering = ordering.to(target.embedding.device)
    files.names["head_weight"] = head
    files.fill(assistant, target)
    assistant.report += checkpoint.ignored
    return assistant.eval()


def wrap_assistant(model: nn.Module, target: Target) -> Assistant:
    """An assistant of transformers that is loaded already; its tensors are shared. TypeError for any other module,
    ValueError if it is for another target."""
    if not isinstance(model, PreTrainedModel) or model.config.model_type not in MODEL_TYPES:
        raise TypeError(
            f"draft: expected a path, a repository of the hub or an assistant of transformers "
            f"({', '.join(MODEL_TYPES)}), got {type(model).__name__}"
        )
    assistant = _made_of(shared_copy(model), target, f"assistant: {type(model).__name__}")
    return assistant.requires_grad_(False).eval()


def _made_of(model: PreTrainedModel, target: Target, origin: str) -> Assistant:
    """The assistant over the tensors of `model`, whose configs change. origin: begins the report."""
    config, sources = model.config, _sources(model, target)
    if config.use_ordered_embeddings and target.vocab_size % config.num_centroids:
        raise ValueError(
            f"draft: its config has num_centroids {config.num_centroids}, which do not divide its "
            f"{target.vocab_size} tokens"
        )
    set_in_configs(model.model, "_attn_implementation", IMPLEMENTATION)
    assistant = Assistant(model, target.model.get_input_embeddings(), sources)
    read = ", ".join(str(source) for source, _, _ in sources)
    scored = ""
    if config.use_ordered_embeddings:
        scored = f", for the tokens of {config.centroid_intermediate_top_k} of {config.num_centroids} clusters"
    assistant.report = [
        origin,
        f"{len(sources)} layers read the keys and values of the target's layers {read}",
        f"embedding: the target's; output matrix: its own{scored}",
    ]
    return assistant


def _sources(model: PreTrainedModel, target: Target) -> tuple[tuple[int, int, int], ...]:
    """`Assistant.sources`: the last of the target's layers of each kind that computes keys and values.

    Kinds [sliding, full, sliding, full, sliding, full], the last two of which share keys: sliding layers of the
    assistant read layer 2, full ones layer 3.
    """
    target.check(model.config.backbone_hidden_size, model.config.get_text_config().vocab_size)
    name, decoder = type(target.model).__name__, target.model.get_decoder()
    layers = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    if not layers or not all(hasattr(layer, "layer_type") and hasattr(layer, "is_kv_shared_layer") for layer in layers):
        raise ValueError(f"draft: it reads the keys and values of Gemma 4; {name} has other layers")
    own = {layer.layer_type: number for number, layer in enumerate(layers) if not layer.is_kv_shared_layer}
    sources = []
    for number, layer in enumerate(model.model.layers):
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


def _heads(attention: nn.Module) -> tuple[int, int]:
    """The KV heads of an attention layer and the size of a head."""
    return attention.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


# Its algorithm


class AssistantAlgorithm(Algorithm):
    """Drafts of one assistant, in trees of `schedule`."""

    ahead = token_bytes = 0

    def __init__(self, assistant: Assistant, options: DraftOptions):
        self.assistant, self.schedule = assistant, options.schedule
        self.weights = DraftWeights(options.draft_weights, assistant, assistant.head_weight)
        self.draft_module = options.draft if isinstance(options.draft, nn.Module) else assistant
        captured = draft_graph(assistant, options, partial(capture_head, assistant, assistant.hidden_size))
        # `attend_to_committed` has one backend.
        ours, name = "triton" if captured.device.type == "cuda" else "sdpa", options.attention_backends["draft"]
        if name not in ("auto", ours):  # guard: drafting-backend
            raise UnsupportedModelError(
                f"attention_backend: an assistant attends to the target's cache by {ours!r} only, not by {name!r}: "
                f"pass a dict with {ours!r} for 'draft'; 'prefill' and 'verify' may have others"
            )
        settings = passes.Settings(options.merge_linears, attention=options.attention("draft"))
        self.scaled = options.attention("verify").scaled
        pipeline = [self.read_target if each is use_tree_attention else each for each in passes.PIPELINE]
        self.graph = passes.run(captured, settings, self.weights.pipeline(pipeline))
        self.logits = DraftHead(assistant.head_weight, ALONE, self.weights) if assistant.clusters is None else None
        self.plan = DraftPlan(self.schedule.nodes, assistant.taps, draws=options.draws, levels=self.schedule.num_steps)

    def read_target(self, graph: ModelGraph, settings: passes.Settings) -> str:
        """A pass in the place of `use_tree_attention`: every marker becomes attention to the target's committed slots.

        The graph gains the inputs ``lengths[B]``, ``cache``, a list of keys, values and, if they have some, scales for
        each layer of the assistant and then the table of pages, and ``max_kv_len``.

        transformers' mask of sliding layers shows the last committed token and as many before it as the window counts.
        """
        gm = graph.gm
        inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        with gm.graph.inserting_after(inputs[-1]):
            max_kv_len, cache, lengths = map(gm.graph.placeholder, ("max_kv_len", "cache", "lengths"))
        if graph.device.type == "cuda":
            load_triton(settings.attention)
        tensors = 3 if self.scaled else 2
        for number, node in enumerate(calls(gm, torch.ops.spec_compile.attention.default)):
            marker = arguments_of(node)
            with gm.graph.inserting_before(node):
                table = gm.graph.call_function(operator.getitem, (cache, -1))
                places = range(number * tensors, (number + 1) * tensors)
                parts = [gm.graph.call_function(operator.getitem, (cache, place)) for place in places]
                keys, values, scales = (*parts, None)[:3]
                window = None if marker["window"] is None else marker["window"] + 1
                seen = lengths, max_kv_len, marker["scale"], marker["softcap"], window, table
                new = gm.graph.call_function(attend_to_committed, (marker["q"], keys, values, scales, *seen))
            replace_node(node, new)
        gm.graph.eliminate_dead_code()
        return f"{len(graph.layers)} layers attend to the committed slots of the target's cache"

    def drafter(self, batch: int, slots: int) -> Drafter:
        return AssistantDrafter(self, batch)

    def refresh(self) -> None:
        self.weights.refresh()

    def explain(self) -> list[str]:
        return ["assistant:", *(f"  {line}" for line in [*self.assistant.report, *self.weights.explain()])]


class AssistantDrafter(Drafter):
    """Keeps the target's state at the last committed slot, and grows the trees below the root."""

    fuses = False  # its layers are compiled once, not once a level

    def __init__(self, algorithm: AssistantAlgorithm, batch: int):
        super().__init__()
        self.assistant, self.graph, self.schedule = algorithm.assistant, algorithm.graph, algorithm.schedule
        self.draws, self.logits = algorithm.plan.draws, algorithm.logits
        self.compiler: PartCompiler | None = None
        self.compiled: dict[int, tuple[nn.Module, Callable]] = {}  # by the rows of a level
        like = self.assistant.head_weight
        self.register_buffer("hidden", like.new_zeros(batch, self.assistant.hidden_size), persistent=False)

    def compile(self, compiler: PartCompiler) -> None:
        if compiler is self.compiler:
            return
        self.compiler = compiler
        for rows in {1, self.schedule.topk}:
            layers = compile_regions(self.graph, compiler, f"layers_{rows}")
            self.compiled[rows] = layers, compiler(self.score, f"score_{rows}")

    def score(self, normed: Tensor) -> Tensor:
        """Logits [B, R, V] of normed [B, R, H]. A method, so that its part finds the weights in the drafter."""
        assistant = self.assistant
        if self.logits is None:
            return clustered_logits(normed, assistant.head_weight, assistant.clusters)
        return self.logits(normed)

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        self.hidden.zero_()  # a prompt of one token has no slot to draft from: these drafts are rejected

    def prefill(self, state: State, ids: Tensor, positions: Tensor, features: list[Tensor], max_kv_len: int) -> None:
        last = state.prompt_lengths - 2 - state.lengths  # the prompt's last token is the root
        keep_row(self.hidden, features[0], last, (last >= 0) & (last < ids.shape[1]))

    def observe(self, state: State, features: list[Tensor], accepted: Accepted, begin: Tensor, max_kv_len: int) -> None:
        gained = state.lengths - begin
        last = accepted.path.gather(1, (gained - 1).clamp(min=0)[:, None])[:, 0]
        keep_row(self.hidden, features[0], last, gained > 0)

    def propose(self, state: State, max_kv_len: int, nodes: int | None = None) -> None:
        read = [state.kv.layer(layer) for layer, *_ in self.assistant.sources]
        cache = [*(tensor for parts in read for tensor in parts if tensor is not None), state.kv.table]
        step = partial(self._step, state.lengths.clone(), cache, max_kv_len)
        root, hidden = state.tree_tokens[:, :1].clone(), self.hidden.clone()
        hidden, logits = step(root, hidden[:, None], None, None, 0, 1)
        propose_grown(state, self.schedule, self.draws, logits[:, 0], hidden[:, 0], step, nodes=nodes)

    def _step(
        self, lengths, cache, max_kv_len, tokens, hidden, ancestors, depth, offset, wanted
    ) -> tuple[Tensor, Tensor]:
        """See `trees.grow.Step`; only the wanted rows are computed, because none reads another."""
        tokens, hidden = tokens[:, -wanted:].contiguous(), hidden[:, -wanted:].contiguous()
        positions = lengths[:, None].expand_as(tokens).contiguous()
        layers, score = self.compiled.get(wanted, (self.graph.gm, self.score))
        hidden, normed = layers(tokens, positions, hidden, lengths, cache, max_kv_len)
        return hidden, score(normed)


def build(target: Inventory, options: DraftOptions) -> AssistantAlgorithm:
    """The algorithm with the assistant that `options` names."""
    if options.ranks.size > 1:
        raise UnsupportedModelError(
            "draft: an assistant reads all keys and values of the target, of which each rank of tensor_parallel has a "
            "part; leave tensor_parallel out, or use another algo"
        )
    return AssistantAlgorithm(load_head(options.draft, target.model, "assistant"), options)


def of_blocks(draft: Any) -> str | None:
    """The algorithm of what transformers also calls an assistant, a DFlash draft; None for any other draft.

    draft: a module, or a folder or a name on the hub.
    """
    blocks = is_dflash(open_files(draft)) if isinstance(draft, (str, Path)) else is_loaded_dflash(draft)
    return "dflash" if blocks else None


RENAMES.append((r"^masked_embedding\.", "clusters."))
register_format("assistant", DraftFormat(is_assistant, read_assistant, wrap=wrap_assistant))
ALGORITHMS["assistant"] = Entry(DraftOptions, build, "an assistant of a Gemma 4 or Muse Glimmer model", of_blocks)
