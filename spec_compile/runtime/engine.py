"""The engine: sessions for each batch size, and the loop that runs their rounds."""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import psutil
import torch

from .. import passes
from ..cache import PAGE
from ..config import Options
from ..drafting import Algorithm
from ..errors import UnsupportedModelError
from ..graph import ModelGraph
from ..recording import Recording
from ..stats import Clock, Stats
from ..tree import MAX_NODES
from .accept.random_numbers import NO_PROBABILITIES
from .prefill_chunks import FIXED, chunks
from .request import Request
from .session import Session
from .state import State

log = logging.getLogger("spec_compile")

SIZES = {"cpu": (1, 4, 16, 64), "cuda": (1, 2, 4, 8, 16, 32, 64)}
"""Nodes that a round may verify."""
SESSIONS = 4
"""Batch sizes kept ready."""
GPU_CACHE = 8192
"""Tokens a sequence may have on a GPU, where memory is taken at once, unless the user says how many."""
AHEAD = 2
"""Rounds in flight on a GPU."""


class Engine:
    """Runs rounds over one captured model. Not thread-safe: its owner holds the lock."""

    def __init__(
        self,
        graph: ModelGraph,
        algorithm: Algorithm,
        options: Options,
        device: torch.device,
        max_positions: int,
    ):
        taps, merge, most = algorithm.taps, options.merge_linears, options.num_draft_tokens
        self.captured = graph
        self.settings = {
            "verify": passes.Settings(merge, taps, attention=options.attention("verify")),
            "prefill": passes.Settings(merge, taps, "none", options.attention("prefill")),
        }
        self.verify, self.prefill = (passes.run(graph, settings) for settings in self.settings.values())
        self.algorithm, self.options, self.device, self.max_positions = algorithm, options, device, max_positions
        self.sizes = (*(n for n in SIZES[device.type] if n < most and algorithm.varies), most)
        self.stats = Stats()
        self.report: Callable[[str], None] = log.info
        self.records = False
        self.recording: Recording | None = None
        """Of the last generate() that ran while `records` was set."""
        self.sessions: OrderedDict[tuple[int, int], Session] = OrderedDict()
        """By nesting depth and batch size."""
        self.running: list[tuple[Session, Clock]] = []
        """Calls of `run` under way: the outermost first, then those that its streamer, criteria or processors made."""
        if options.max_cache_len is not None:
            self.check_memory(1, options.max_cache_len)

    def capacity(self, batch: int) -> int:
        """Tokens a sequence may hold in a batch of this size, until a call needs more."""
        if self.options.max_cache_len is not None:
            return self.options.max_cache_len
        if self.device.type == "cuda":
            return min(self.max_positions, GPU_CACHE)
        memory = psutil.virtual_memory().total
        return min(self.max_positions, max(memory // 4 // (self.token_bytes * batch), 1024))

    def room(self, batch: int) -> int:
        """Tokens a sequence may hold in the next call of this batch size before its cache has to grow."""
        session = self.sessions.get((len(self.running), batch))
        return self.capacity(batch) if session is None else session.capacity

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, the draft's included."""
        return self.verify.token_bytes + self.algorithm.token_bytes

    def session(self, batch: int) -> Session:
        """The session for a batch size and the present nesting depth: a call made inside another has buffers of its
        own. The least recently used ones beyond a few are dropped."""
        key = len(self.running), batch
        if key not in self.sessions or self.sessions[key].is_growing:  # a growth that failed, or that a fork cut off
            self.sessions[key] = Session(self, batch)
        self.sessions.move_to_end(key)
        busy = [session for session, _ in self.running]
        idle = [other for other, session in self.sessions.items() if other != key and session not in busy]
        for other in idle[: max(len(self.sessions) - SESSIONS, 0)]:
            del self.sessions[other]
        return self.sessions[key]

    def forget_running(self) -> None:
        """In a forked process: end what threads that it does not have were in the midst of. Their sessions, with all
        that is compiled, serve again; a call begins by setting every buffer that is read."""
        for session, _ in self.running:
            session.drafter.end([])
            session.texts = []
        self.running.clear()

    def refresh(self) -> None:
        """The weights have changed: compute anew what the drafter copied from them, and use no keys and values of
        earlier calls that its cache holds."""
        self.algorithm.refresh()
        for session in self.sessions.values():
            session.texts = []

    @torch.no_grad()
    def run(self, request: Request) -> Iterator[list[list[int]]]:
        """Generate; yields, round by round, the tokens each row gained (none once it has finished).

        The caller may run another request before it takes the next round.
        """
        session, clock = self.session(len(request.prompts)), Clock(self.stats)
        request.state = session.state
        for _, outer in self.running[-1:]:
            outer.spend("host")
        self.running.append((session, clock))
        try:
            yield from self._rounds(session, clock, request)
        finally:
            self.running.remove((session, clock))
            for _, outer in self.running[-1:]:
                outer.restart()

    def _rounds(self, session: Session, clock: Clock, request: Request) -> Iterator[list[list[int]]]:
        """On a GPU the next round is launched before the outcome of the last is there, unless its tokens are chosen
        outside the round."""
        state, drafter, stats = session.state, session.drafter, self.stats
        policy = session.policies["look" if request.acceptor else "round"]
        ahead = 1 if request.host_acceptor or not session.on_gpu else AHEAD
        trace, begun, longest = [], dict(stats.seconds), max(request.max_lengths)
        recording = Recording(request.prompts) if self.records else None
        if max(map(len, request.prompts)) >= session.capacity:
            self._grow(session, request, longest, 0)
        if session.ring is not None:
            session.ring.begin()
        state.reset(request.prompts, request.min_lengths, request.max_lengths, request.eos)
        state.seed.fill_(request.seed)
        state.temperature.fill_(request.temperature)
        if request.past is not None:
            state.fill(request.past)
            if not self._draft_has(session, request):
                state.lengths.zero_()
        texts = session.texts = [list(prompt) for prompt in request.prompts]
        drafter.begin(state, request.prompts, request.references, request.share_text)
        lengths: list[int] = []
        try:
            if not self.algorithm.varies:  # made later they would run over drafts that the drafter's cache holds
                session.build(self.sizes[-1], request.draw_in_round, chosen=request.host_acceptor is not None)
            self._prefill(session, request)
            state.root()
            if request.first_logits is None:
                drafter.propose(state, self._span(state, max(map(len, request.prompts))))
            counts, hints = state.tree_count.tolist(), state.tree_hint.tolist()
            lengths = [len(prompt) - 1 for prompt in request.prompts]
            finished = [length + 1 >= limit for length, limit in zip(lengths, request.max_lengths)]
            flying: deque[tuple[int, Callable[[], list[list[int]]]]] = deque()
            clock.spend("prefill")
            while not all(finished):
                active = [row for row, done in enumerate(finished) if not done]
                room = max(request.max_lengths[row] - lengths[row] - 1 for row in active)
                drafting = drafter.seconds
                while len(flying) < min(ahead, room):
                    if longest > session.capacity <= max(lengths) + 1 + sum(nodes for nodes, _ in flying):
                        if flying:
                            break  # what is on its way first
                        self._grow(session, request, longest, max(lengths) + MAX_NODES + self.algorithm.reach)
                    seen = [(counts[row], hints[row]) for row in active] if not flying else None
                    nodes = policy.choose(*zip(*seen)) if seen else policy.choose_ahead()
                    nodes = 1 if request.first_logits is not None else nodes
                    span = self._span(state, max(lengths) + nodes)
                    if request.host_acceptor is None:
                        flying.append((nodes, session.launch(request.draw_in_round, nodes, span)))
                    else:
                        flying.append((nodes, self._chosen(session, request, nodes, span)))
                nodes, read = flying.popleft()
                outcome = read()
                seconds = clock.spend("verify")
                stats.move("verify", "draft", drafter.seconds - drafting)
                gained, paths = [[] for _ in request.prompts], []
                offered = [counts[row] for row in active], [hints[row] for row in active]
                if recording:
                    recording.add(nodes, seconds, dict(zip(active, offered[0])), outcome)
                for row in active:
                    count, done, counts[row], hints[row], depth, *rest = outcome[row]
                    gained[row] = rest[:count]
                    texts[row] += gained[row]
                    if -1 in gained[row]:
                        raise RuntimeError(NO_PROBABILITIES)
                    paths.append(rest[nodes + 1 : nodes + count])
                    lengths[row] += count
                    finished[row] = bool(done)
                    stats.count_depths(depth, len(paths[-1]))
                policy.learn(nodes, *offered, paths, None if session.on_gpu else seconds)
                stats.trace = trace  # a call inside this one has put its own there
                stats.count_round(nodes, [len(tokens) for tokens in gained], len(active))
                yield gained
                for row in request.stopped:
                    if not finished[row]:
                        finished[row] = True
                        state.finished[row : row + 1].fill_(True)
                clock.spend("host")
        finally:
            drafter.end(lengths)
            if recording:
                recording.seconds = {name: spent - begun[name] for name, spent in stats.seconds.items()}
                self.recording = recording

    def check_memory(self, batch: int, tokens: int, argument: str = "max_cache_len") -> None:
        """Say what caches of `tokens` tokens for `batch` sequences take; UnsupportedModelError, naming the argument
        that asks for them, if the memory cannot hold them."""
        needed, memory = tokens * self.token_bytes * batch, "the machine has"
        free = psutil.virtual_memory().total  # on a CPU, where pages are taken as they are written
        if self.device.type == "cuda":
            free, memory = torch.cuda.mem_get_info(self.device)[0], "free on the GPU are"
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        takes = f"a cache of {tokens} tokens for {batch} sequences takes {needed / 1e9:.2f} GB, {memory}"
        if needed > free:
            raise UnsupportedModelError(
                f"{argument}: {takes} {free / 1e9:.2f} GB, so {(needed - free) / 1e9:.2f} GB are missing; ask for "
                "fewer tokens or fewer sequences"
            )
        if self.device.type == "cuda":
            self.report(f"{takes} {free / 1e9:.2f} GB")

    def _grow(self, session: Session, request: Request, tokens: int, used: int) -> None:
        """Make room for `tokens` tokens a sequence; the first `used` slots of the caches are in use."""
        log.warning(
            "the cache of %d tokens a sequence is full and grows to %d, whose rounds are compiled anew; with "
            "speculate(model, max_cache_len=%d) it has the room from the start", session.capacity, tokens, tokens,
        )  # fmt: skip
        with session.growing(tokens, used):
            if not self.algorithm.varies:
                session.build(self.sizes[-1], request.draw_in_round, chosen=request.host_acceptor is not None)

    def _draft_has(self, session: Session, request: Request) -> bool:
        """Whether a drafter's own cache holds what `request.past` does for the target, from the call before, or cannot,
        since nobody knows the tokens. Else the prompts are processed again."""
        if self.algorithm.graph is None or request.has_unknown_tokens:
            return True
        held = session.state.lengths.tolist()
        if len(session.texts) != len(held):
            return False
        return all(text[: n + 1] == prompt[: n + 1] for n, text, prompt in zip(held, session.texts, request.prompts))

    def _chosen(self, session: Session, request: Request, nodes: int, span: int) -> Callable[[], list[list[int]]]:
        """A round whose tokens the request chooses; the first logits may be known already."""
        look, finish = session.step("look", nodes), session.step("finish", nodes)  # building them runs them
        logits, features, request.first_logits = request.first_logits, [], None
        if logits is None:
            logits, *features = look(span)
        else:
            state = logits.new_zeros(len(logits), 1, self.verify.hidden_size, dtype=self.verify.dtype)
            logits, features = logits[:, None], [state] * len(self.algorithm.taps)  # nobody has seen them
        accepted = request.host_acceptor(session.state.tree(nodes), logits)
        outcome = finish(accepted.path, accepted.tokens, accepted.count, features, span)
        return outcome.tolist

    def _span(self, state: State, slots: int) -> int:
        """Slots of the cache for a step to look at, that needs the first `slots` and those that a drafter may use."""
        return min(-(-(slots + self.algorithm.reach) // PAGE) * PAGE, state.capacity)

    def _prefill(self, session: Session, request: Request) -> None:
        """Keys and values of every prompt token but the last, beyond those that the state has."""
        state, limit = session.state, request.prefill_chunk_size
        sizes = [n for n in session.prefill_sizes if n <= (limit or n)] or session.prefill_sizes[-1:]
        held = state.lengths.tolist()
        place = max(held)
        missing = max(len(prompt) - 1 - there for prompt, there in zip(request.prompts, held))
        for size in chunks(missing, sizes, FIXED[self.device.type]):
            session.prefill(size, self._span(state, place + size))
            place += size
