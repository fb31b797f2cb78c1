"""The target's hidden states and logits, from which a draft learns, computed for each batch."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..capture.taps import decoder_layers
from ..parallel.slices import whole
from ..passes.tap_hidden_states import FINAL
from ..runtime.steps.capture import Captured
from .capture import ByShape
from .loss import likeliest

TOKENS = 1 << 15
"""Tokens that the target's layers process at a time, because transformers stores their keys and values."""
LOGITS = 1 << 30
"""Bytes of logits in memory at a time, if the target changes them after the product with its output matrix."""


@dataclass(frozen=True)
class Features:
    """The target's results for ids [B, L].

    states: [B, L, h] for each tap
    logits: a function from indices [n] int64 among the B * L positions to the logits [n, K] of the kept tokens
    choices: [B, L] int64; the likeliest next token at each position, or None
    """

    states: list[Tensor]
    logits: Callable[[Tensor], Tensor]
    choices: Tensor | None = None


class TargetFeatures:
    """Runs the frozen target over ids."""

    def __init__(
        self, model: PreTrainedModel, taps: tuple[int, ...], kept: Tensor | None = None, captures: bool = True
    ):  # fmt: skip
        """taps: as in `Head.taps`. kept: [K] int64; the tokens whose logits are wanted (None: all). captures: see
        `Trainer`."""
        self.model, self.taps, self.kept = model, taps, kept
        self._weight = whole(model.get_output_embeddings().weight, keep=True).detach()
        self._kept_weight = self._weight if kept is None or len(kept) == len(self._weight) else self._weight[kept]
        states, logits = self._run(torch.arange(2, device=model.device)[None], with_logits=True)
        # Some models scale or bound their logits after the output matrix. Other models' logits are made when needed.
        self._plain = torch.equal(F.linear(states[FINAL], self._weight).float(), logits.float())
        self._graphs: ByShape[Captured] = ByShape(type(model).__name__, model.device, captures)
        self._pool = torch.cuda.graph_pool_handle() if self._graphs.captures else None

    @torch.no_grad()
    def __call__(self, ids: Tensor, choices: bool = True) -> Features:
        """The features of ids [B, L] int64, on the target's device. choices: True to compute them, too.

        Padding on the right needs no mask, because causal layers do not see it from the tokens before it.
        """
        most = TOKENS if self._plain else LOGITS // (len(self._weight) * self.model.dtype.itemsize)
        run = self._replay if self._plain else partial(self._run, with_logits=True)
        parts = [run(rows) for rows in ids.split(max(1, most // ids.shape[1]))]
        tapped = {tap: torch.cat([states[tap] for states, _ in parts]) for tap in parts[0][0]}
        if self._plain:
            final = tapped[FINAL].flatten(0, 1)
            most_likely = likeliest([(final, self._weight)]).view(ids.shape) if choices else None
            logits = partial(_product, final, self._kept_weight)
        else:
            most_likely = torch.cat([made.argmax(dim=-1) for _, made in parts])
            kept = [made if self.kept is None else made[..., self.kept] for _, made in parts]
            logits = torch.cat(kept).flatten(0, 1).__getitem__
        return Features([tapped[tap] for tap in self.taps], logits, most_likely)

    def _replay(self, ids: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """`_run` without logits. On a GPU it is captured when ids of a shape come for the second time, because the
        launches of a small model take as long as its kernels."""
        run = partial(self._run, with_logits=False)
        graph = self._graphs.find(ids.shape, lambda: Captured(run, (ids.clone(),), self._pool))
        if graph is None:
            return run(ids)
        states, logits = graph(ids)  # the next replay overwrites them
        return {tap: state.clone() for tap, state in states.items()}, logits

    @torch.no_grad()
    def _run(self, ids: Tensor, with_logits: bool) -> tuple[dict[int, Tensor], Tensor]:
        """One forward of the target with hooks at the taps: the states of each tap and of `FINAL`, and the logits.

        Without logits the output matrix multiplies no row, and they are empty.
        """
        tapped: dict[int, Tensor] = {}

        def keep(tap: int, value: Tensor | tuple) -> None:
            tapped[tap] = value[0] if isinstance(value, tuple) else value

        def keep_final(module: nn.Module, args: tuple) -> tuple:
            keep(FINAL, args)
            return args if with_logits else (args[0][:, :0],)

        layers = decoder_layers(self.model)
        with ExitStack() as hooks:
            hooks.callback(self.model.get_output_embeddings().register_forward_pre_hook(keep_final).remove)
            for tap in {*self.taps} - {FINAL}:
                # Tap 0 is the first layer's input, tap i the output of layer i, FINAL the input of the output matrix.
                if tap == 0:
                    handle = layers[0].register_forward_pre_hook(lambda module, args: keep(0, args))
                else:
                    handle = layers[tap - 1].register_forward_hook(lambda module, args, out, tap=tap: keep(tap, out))
                hooks.callback(handle.remove)
            # Autocast would cast weights, and free the casts at its end, while a graph goes on to read them.
            hooks.enter_context(torch.autocast(ids.device.type, enabled=False))
            logits = self.model(input_ids=ids, use_cache=True).logits  # without a cache, transformers waits for the GPU
        return tapped, logits


def _product(states: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """The logits [n, V] of rows [n] of states [R, h], in the dtype of the target, as it computes them itself."""
    with torch.autocast(states.device.type, enabled=False):
        return F.linear(states[rows], weight)
