"""`Target`: the parts of a model that its draft shares, and the sizes that both must have."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...capture.quantised import RoundedHead, packed_layer
from ...kernels.linear.quantised import Packed
from ...parallel.slices import whole
from .files import Checkpoint


@dataclass(frozen=True)
class Target:
    """The target's embedding [V, h], output matrix [V, h] and text config.

    codes: the output matrix in 8 bits, if the target itself reads it so.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    embedding: nn.Parameter
    head_weight: nn.Parameter
    codes: Packed | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Target":
        """ValueError if no head can share the output layer and the embedding of `model`."""
        output = model.get_output_embeddings()
        if output is None or getattr(output, "bias", None) is not None:
            problem = "has no output layer" if output is None else "has an output layer with a bias"
            raise ValueError(f"draft: {type(model).__name__} {problem}, which draft heads share")
        shared = [whole(part.weight, keep=True) for part in (model.get_input_embeddings(), output)]
        if len(shared[0]) < len(shared[1]):
            raise ValueError(
                f"draft: {type(model).__name__} generates {len(shared[1])} tokens and reads only {len(shared[0])}, but "
                "draft heads read what they draft; pass algo='ngram'"
            )
        codes = packed_layer(output) if isinstance(output, RoundedHead) else None
        return cls(model, model.config.get_text_config(decoder=True), *shared, codes)

    @property
    def hidden_size(self) -> int:
        """h, the size of the states that heads read."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """V, the rows of the output matrix."""
        return self.head_weight.shape[0]

    def check(self, hidden_size: int, vocab_size: int | None) -> None:
        """ValueError if a head was made for a model of other sizes."""
        embedded = self.embedding.shape[0]
        for name, theirs, ours in (
            ("hidden_size", hidden_size, self.hidden_size),
            ("vocab_size", vocab_size, embedded if vocab_size == embedded else self.vocab_size),
        ):
            if theirs is not None and theirs != ours:
                raise ValueError(
                    f"draft: it was made for a model with {name} {theirs}, {type(self.model).__name__} has {ours}; "
                    "take the head of this model"
                )

    def skip_copies(self, checkpoint: Checkpoint, names: dict[str, str]) -> None:
        """`skip_copy` of embedding and output matrix. names: ours -> the checkpoint's."""
        self.skip_copy(checkpoint, names.get("embedding"), self.embedding)
        self.skip_copy(checkpoint, names.get("head_weight"), self.head_weight)

    def skip_copy(self, checkpoint: Checkpoint, name: str | None, shared: Tensor) -> None:
        """Leave a tensor out, if it is there, because the target's is used, and say if the two differ."""
        if name is not None and name in checkpoint:
            same = likeness(checkpoint, name, shared) > 0.99
            checkpoint.ignore(name, "a copy of the target's" if same else "the target's is used, though it is another")


def likeness(checkpoint: Checkpoint, name: str, ours: Tensor) -> float:
    """Correlation of some rows of a tensor with the same rows of `ours`; 0 if their shapes differ."""
    if checkpoint.shapes[name] != tuple(ours.shape):
        return 0.0
    rows = torch.arange(0, ours.shape[0], max(1, ours.shape[0] // 64))
    pair = [checkpoint.rows(name, rows), ours.detach()[rows.to(ours.device)].cpu()]
    return float(torch.corrcoef(torch.stack([values.flatten().float() for values in pair])).nan_to_num()[0, 1])
