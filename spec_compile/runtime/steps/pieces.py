"""Rounds and prefills whose parts are compiled, each part by itself.

Layers alike share one compiled function, so that a deep model compiles nearly as fast as a shallow one. On a GPU one
compilation serves every number of nodes above one, because nodes cost little there. On a CPU, where they cost
arithmetic, every number of nodes has its own.
"""

import torch
from torch import Tensor

from ...drafting import Drafter
from ...tree import MAX_NODES
from ..round import Prefill, Round
from ..runtime import Runtime
from ..state import State
from .compile import PartCompiler, example_size
from .regions import compile_regions


class Pieces:
    """The rounds and the prefill of one batch size, made on first use. Those that need the same code share it."""

    def __init__(self, runtime: Runtime, state: State, drafter: Drafter):
        self.runtime, self.state, self.drafter = runtime, state, drafter
        self._rounds: dict[int, tuple[Round, PartCompiler | None]] = {}
        """By number of nodes, where 2 stands for every number above one on a GPU: the round, and what compiled it."""
        self._finishes: set[Round] = set()
        """Rounds whose second half has run, and so is compiled, too."""
        self._prefill: Prefill | None = None
        self._compilers: dict[str, PartCompiler] = {}
        self.example: Pieces | None = None
        """Those of another number of rows, which what they compile does not depend on: it serves here, too."""
        self.rows_vary = False
        """Whether what is compiled here is to serve any number of rows above one."""

    def clear(self) -> None:
        """Forget everything: the buffers have other sizes now."""
        self._rounds.clear()
        self._finishes.clear()
        self._compilers.clear()
        self._prefill = None

    def round(self, nodes: int) -> Round:
        """The round over `nodes` nodes: its `forward` and `look` take the number again."""
        return self._round(nodes)[0]

    def finish(self, nodes: int) -> Round:
        """The same round, whose `finish` is compiled as well."""
        if self.example is not None:
            self.example.finish(nodes)
        round_, compiler = self._round(nodes)
        if compiler is not None and round_ not in self._finishes:
            round_.finish(*self.accepted(round_, compiler.nodes, compiler.slots))
            self._finishes.add(round_)
        return round_

    def accepted(self, round_: Round, nodes: int, slots: int) -> tuple:
        """Arguments to try `Round.finish` with: the root alone was accepted, of `nodes` nodes."""
        _, *features = round_.look(slots, nodes)
        path = torch.zeros(self.state.batch, nodes, dtype=torch.int64, device=self.runtime.device)
        return path, path.clone(), torch.ones_like(path[:, 0]), features, slots

    def prefill(self) -> Prefill:
        """The prefill, for chunks of any size above one."""
        if self._prefill is None:
            if self.example is not None:
                self.example.prefill()
            self._prefill = prefill = Prefill(self.runtime.prefill, self.drafter, self.state)
            if self.runtime.options.compile:
                compiler = self._compiler(None, "prefill")
                prefill.prepare = compiler(prefill.prepare, "prepare")
                prefill.model = compile_regions(self.runtime.prefill, compiler, "model")
                if self.drafter.fuses and not self.runtime.on_gpu:
                    prefill.conclude = compiler(prefill.conclude, "conclude")
                prefill.forward(compiler.nodes, compiler.slots)
        return self._prefill

    def _round(self, nodes: int) -> tuple[Round, PartCompiler | None]:
        """The round over `nodes` nodes, and what compiled it (None: it runs eagerly)."""
        on_gpu = self.runtime.on_gpu
        key = min(nodes, 2) if on_gpu else nodes
        if key not in self._rounds:
            if self.example is not None:
                self.example.round(nodes)
            # A drafter that knows one size alone is not run for a round that verifies nothing.
            plan = self.runtime.algorithm.plan
            proposes = nodes > 1 or plan.sizes != "fixed" or plan.draws
            round_ = Round(self.runtime.verify, self.drafter, self.state, None if on_gpu else nodes, proposes)
            compiler = self._compile_round(round_, nodes) if self.runtime.options.compile else None
            self._rounds[key] = round_, compiler
        return self._rounds[key]

    def _compile_round(self, round_: Round, nodes: int) -> PartCompiler:
        compiler = self._compiler(nodes, f"n{nodes}" if nodes == 1 or not self.runtime.on_gpu else "any")
        round_.prepare = compiler(round_.prepare, "prepare")
        round_.verify = compile_regions(self.runtime.verify, compiler, "verify")
        for name in ("conclude", "finish") if self.drafter.fuses else ("accept", "settle", "outcome"):
            setattr(round_, name, compiler(getattr(round_, name), name))
        self.drafter.compile(compiler)
        round_.forward(compiler.slots, compiler.nodes)
        return compiler

    def _compiler(self, nodes: int | None, tag: str) -> PartCompiler:
        """For parts over `nodes` nodes, or (None) over chunks of a prompt."""
        if self.example is not None:
            return self.example._compilers[tag]
        static, rows = self.static_sizes(), self.state.batch
        exact = nodes == 1 or (nodes is not None and not self.runtime.on_gpu)
        example = nodes if exact else example_size(static, MAX_NODES)
        slots = example_size({*static, *(example * size for size in static)})
        varying = [slots, *([] if exact else [example]), *([rows] if self.rows_vary else [])]
        name = f"{'any' if self.rows_vary else f'b{rows}'}_{tag}"
        self._compilers[tag] = PartCompiler(
            self.runtime.device, name, tuple(varying), example, slots, exact, rows if self.rows_vary else 0
        )
        return self._compilers[tag]

    def static_sizes(self) -> set[int]:
        """Every size of a tensor that two parts hand each other, but the numbers of nodes and of slots."""
        graphs = [self.runtime.verify, self.runtime.prefill, self.runtime.algorithm.graph]
        modules = [graph.gm for graph in graphs if graph is not None] + [self.state, self.drafter]
        tensors: list[Tensor] = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        sizes = {size for tensor in tensors for size in tensor.shape}
        groups = {layer.heads // layer.kv_heads for graph in graphs if graph is not None for layer in graph.layers}
        return {*sizes, *groups, self.state.batch, self.runtime.algorithm.plan.lookahead_slots}
