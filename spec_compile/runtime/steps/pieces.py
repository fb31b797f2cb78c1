"""Rounds and prefills whose parts are compiled, each part by itself.

Layers alike share one compiled function, so that a deep model compiles nearly as fast as a shallow one. One compilation
serves single rows with any number of slots, and a second one every number of rows. On a GPU it serves any number of
nodes above one; on a CPU, where each node costs arithmetic, every number of nodes has its own.
"""

from collections.abc import Callable
from functools import partial

import torch

from ...artefacts.compiler import PartCompiler
from ...compat import COMPILE_LOCK
from ...drafting import Drafter
from ...kernels.together import compile_together
from ...tree import MAX_NODES
from ..round import Prefill, Round
from ..runtime import Runtime
from ..state import State
from .code import Form
from .example import example_size, example_sizes, form_of, slots_vary
from .regions import compile_regions
from .untouched import untouched


class Pieces:
    """The rounds and the prefill over the buffers of `state` and `drafter`, made on first use.

    An example compiles their parts: pieces over buffers of their own, whose sizes tell which dimensions may vary. It
    runs each part once, before any session does, or later if parts are compiled in the background (see `tiers`).
    """

    def __init__(self, runtime: Runtime, state: State, drafter: Drafter, form: Form | None = None):
        """form: the shapes that the code of an example serves; None for the pieces of a session."""
        self.runtime, self.state, self.drafter = runtime, state, drafter
        self._example_form = form
        self._rounds: dict[str, Round] = {}
        """By name (see `_name`): on a CPU n4 verifies 4 nodes and n4_to_4 also proposes 4 of more; on a GPU any and
        any_to_4 verify any number above one."""
        self._prefill: Prefill | None = None

    @property
    def form(self) -> Form:
        """The shapes that the code here serves."""
        if self._example_form is not None:
            return self._example_form
        return form_of(self.runtime, self.state.batch, self.state.capacity)

    def grow(self) -> None:
        """Before the buffers get more slots: forget steps that serve only one number of them."""
        if not slots_vary(self.runtime):
            self._rounds.clear()
            self._prefill = None

    def round(self, nodes: int) -> Round:
        """The round over `nodes` nodes; its `forward` and `look` take the number again."""
        runtime, plan = self.runtime, self.runtime.algorithm.plan
        next_nodes = plan.next_nodes(nodes)
        few = next_nodes if next_nodes < plan.nodes else None
        tag = _tag(nodes, runtime.on_gpu)
        name = _name(tag, few)
        if name not in self._rounds:
            self._complete(name, lambda example: example.round(nodes))
            size = None if runtime.on_gpu else nodes
            round_ = Round(runtime.verify, self.drafter, self.state, size, few, runtime.guard)
            if runtime.options.compile:
                self._compile_round(round_, self._compiler(nodes, tag))
            self._rounds[name] = round_
        return self._rounds[name]

    def finish(self, nodes: int) -> Round:
        """The same round, whose `finish` is compiled as well."""
        round_, tag = self.round(nodes), _tag(nodes, self.runtime.on_gpu)
        self._complete(f"finish {_name(tag, round_.next_nodes)}", lambda example: example.finish(nodes))
        if self._example_form is not None:
            compiler = self._compiler(nodes, tag)
            round_.finish(*self.accepted(round_, compiler.nodes, compiler.slots))
        return round_

    def accepted(self, round_: Round, nodes: int, slots: int) -> tuple:
        """Arguments to try `Round.finish` with: of `nodes` nodes only the root is accepted."""
        _, *features = round_.look(slots, nodes)
        path = torch.zeros(self.state.batch, nodes, dtype=torch.int64, device=self.runtime.device)
        return path, path.clone(), torch.ones_like(path[:, 0]), features, slots

    def prefill(self) -> Prefill:
        """The prefill, for chunks of any size above one."""
        if self._prefill is None:
            self._complete("prefill", lambda example: example.prefill())
            self._prefill = prefill = Prefill(self.runtime.prefill, self.drafter, self.state, self.runtime.guard)
            if self.runtime.options.compile:
                compiler = self._compiler(None, "prefill")
                prefill.prepare = compiler(prefill.prepare, "prepare")
                prefill.model = compile_regions(self.runtime.prefill, compiler, "model")
                if self.drafter.fuses and not self.runtime.on_gpu:
                    prefill.conclude = compiler(prefill.conclude, "conclude")
                if self._example_form is not None:
                    prefill.forward(compiler.nodes, compiler.slots)
        return self._prefill

    def _compile_round(self, round_: Round, compiler: PartCompiler) -> None:
        round_.prepare = compiler(round_.prepare, "prepare")
        round_.verify = compile_regions(self.runtime.verify, compiler, "verify")
        for name in ("conclude", "finish") if self.drafter.fuses else ("accept", "settle", "outcome"):
            setattr(round_, name, compiler(getattr(round_, name), _name(name, round_.next_nodes)))
        self.drafter.compile(self._compiler(self.runtime.algorithm.plan.nodes, "draft"))
        if self._example_form is not None:
            round_.forward(compiler.slots, compiler.nodes)
            if not (round_.proposes or self.drafter.fuses):
                self.drafter.propose(self.state, compiler.slots)

    def _complete(self, name: str, build: Callable[["Pieces"], object]) -> None:
        """Let an example compile what `build` makes of it, unless this code has it."""
        code, key = self.runtime.code, (self.form, name)
        if self._example_form is not None or not self.runtime.options.compile or key in code.complete:
            return
        run = partial(_run_example, self.runtime, self.form, build)
        if self.runtime.tiers is not None:
            self.runtime.tiers.ask(key, run)
            return
        with COMPILE_LOCK:
            if key not in code.complete:
                run()
                code.complete.add(key)

    def _compiler(self, nodes: int | None, tag: str) -> PartCompiler:
        """The compiler of parts over `nodes` nodes; None: over chunks of a prompt."""
        code, form = self.runtime.code, self.form
        if (form, tag) not in code.compilers:
            sizes = example_sizes(self.runtime, form)
            exact = nodes == 1 or (nodes is not None and not self.runtime.on_gpu)
            static = {*sizes.static, sizes.rows}
            example = nodes if exact else example_size(static, MAX_NODES)
            slots = example_size({*static, *(example * size for size in static)})
            varying = (slots, *(() if exact else (example,)), *sizes.varying)
            name = f"{f'b{form.rows}' if form.rows else 'any'}_{tag}"
            new = PartCompiler(self.runtime.device, name, varying, example, slots, exact, code.source)
            code.compilers.setdefault((form, tag), new)
        return code.compilers[form, tag]


def _run_example(runtime: Runtime, form: Form, build: Callable[[Pieces], object]) -> None:
    """Let the example of this form, whose parts may be compiled, make something and run it. It leaves no trace."""
    if form not in runtime.examples:
        sizes, plan = example_sizes(runtime, form), runtime.algorithm.plan
        state = State(runtime.verify, sizes.rows, sizes.slots, runtime.device, plan)
        drafter = runtime.algorithm.drafter(sizes.rows, sizes.slots)
        runtime.examples[form] = Pieces(runtime, state, drafter, form)
    example = runtime.examples[form]
    runtime.code.open(form)
    try:
        with untouched(example.state, example.drafter):
            if runtime.tiers is not None:
                other = Pieces(runtime, example.state, example.drafter, form)  # pieces run only when they are made
                compile_together(partial(build, other))
            build(example)
    finally:
        runtime.code.close()


def _tag(nodes: int, on_gpu: bool) -> str:
    """The name of the parts that serve a round over `nodes` nodes."""
    return f"n{nodes}" if nodes == 1 or not on_gpu else "any"


def _name(name: str, next_nodes: int | None) -> str:
    """The name of a part, or of parts, of rounds that propose so many nodes (see `Round`)."""
    return name if next_nodes in (None, 1) else f"{name}_to_{next_nodes}"
