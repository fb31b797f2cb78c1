"""The models that `speculate` makes: our ``generate()``, and continuous batching."""

import operator
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils.logging import tqdm

from ..capture import copies
from ..capture.changes import KEPT
from ..capture.copies import FollowedConfig, follow
from ..parallel.messages import pack, unpack
from ..parallel.ranks import Alone
from ..runtime.generate import SpeculativeMixin
from .intake import child_name
from .manager import Manager
from .output import Output
from .request_options import read_sequences

MOST_NUMBERS = 1 << 16
"""Most numbers of a message to the other ranks."""


class BatchingMixin(SpeculativeMixin):
    """Put in front of a model's own class, makes ``generate_batch()`` and continuous batching ours, too."""

    def init_continuous_batching(
        self, generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None, workload_hints: WorkloadHints | None = None,
    ) -> Manager:  # fmt: skip
        """A `Manager`, not started, with transformers' arguments; the one that was kept, if there is one.

        `max_requests_per_batch` (slots), `num_blocks` and `page_size` (tokens of all requests together),
        `max_memory_percent` (share of a GPU's free memory), `max_queue_size`, `seed` and `return_logprobs` of
        `continuous_batching_config` count; graphs are not what our rounds have.
        """
        kept = vars(self).get("_cached_continuous_batching_manager")
        if isinstance(kept, Manager) and kept.is_of_this_process:
            return kept
        # transformers still takes a config of batches from a generation config.
        within = getattr(generation_config or self.generation_config, "continuous_batching_config", None)
        within = within if isinstance(within, ContinuousBatchingConfig) else ContinuousBatchingConfig()
        config = continuous_batching_config or within
        return Manager(self, generation_config, config, workload_hints)

    def generate_batch(
        self, inputs: list[list[int]], generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None, record_timestamps: bool = False,
        progress_bar: bool = False, persistent_manager: bool = False, warmup: bool = True, **options: Any,
    ) -> dict[str, Output]:  # fmt: skip
        """transformers' ``generate_batch()``: answers all prompts, and returns the last output of each request by its
        name, in the order of the prompts.

        inputs: token ids of each prompt. options: see `Manager.add_request`, for all prompts, and `adapter_names`,
        a list with the `adapter_name` of each prompt. The other arguments are transformers'. A prompt that is refused
        has an output with `status` FAILED and the reason in `error`; the others are answered. On several ranks all of
        them call this alike, and all return the same.
        Raises what `Manager.add_request` raises if every prompt is refused, and RuntimeError if the model has
        changed since speculate(), or if the thread dies.
        """
        turns, ranks = self.speculation.engine.turns, self.speculation.options.ranks
        if turns.is_mine:
            raise RuntimeError(
                "generate_batch(): inside pause(), or in a processor, criterion or streamer of a generate(), it would "
                "wait for rounds that wait for this thread; call it afterwards, or call generate()"
            )
        defaults = self.generation_config if generation_config is None else generation_config
        number = read_sequences(
            options.get("num_return_sequences"), defaults.num_return_sequences,
            self.generation_config.num_return_sequences,
        )  # fmt: skip
        if ranks.size > 1:
            ranks.agree("generate_batch()", {"the prompts": [*map(list, inputs)], "the options": sorted(options)})
        names = _read_adapter_names(options.pop("adapter_names", None), len(inputs))
        if not inputs:
            return {}
        self.speculation.engine.refuse_changes()
        hints = WorkloadHints(
            max_prompt_length=max((len(ids) for ids in inputs if hasattr(ids, "__len__")), default=0),
            max_generated_length=options.get("max_new_tokens") or defaults.max_new_tokens or 0,
            num_requests=len(inputs) * number,
        )
        outputs, failure = {}, None
        try:
            with self.continuous_batching_context_manager(
                generation_config=generation_config, continuous_batching_config=continuous_batching_config,
                warmup=warmup, persistent_manager=persistent_manager, workload_hints=hints,
            ) as manager:  # fmt: skip
                if ranks.leads:
                    try:
                        outputs = _answer(manager, inputs, names, number, record_timestamps, progress_bar, options)
                    except BaseException:
                        manager.stop(hard_stop=True)  # what is under way is for nobody
                        raise
                else:
                    manager.join(0.0)
        except BaseException as error:
            failure = error
        with ranks.call():  # all ranks return the same, or raise
            if failure is not None:
                raise failure
            return share(ranks, outputs, dict[str, Output])

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Give back the memory of a manager that was kept, and of the rows that an earlier one has left."""
        super().destroy_cached_continuous_batching_manager()
        self.speculation.engine.idle_batch = None


def speculative(model: PreTrainedModel) -> PreTrainedModel:
    """An object of a subclass with our generate(), which shares all modules and parameters of the model."""
    cls = type(model)
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    fast: Any = copies.shallow(model, type(cls.__name__, (BatchingMixin, cls), names))
    follow(fast, FollowedConfig(model))
    for name in ("generate", KEPT):  # a generate() set on the object is run by `SpeculativeMixin.generate`
        fast.__dict__.pop(name, None)
    return fast


def _read_adapter_names(names: Any, prompts: int) -> Sequence[str | None] | None:
    if names is not None and not isinstance(names, (list, tuple)):
        raise TypeError(f"adapter_names: expected a list of names, one a prompt, got {type(names).__name__}")
    if names is not None and len(names) != prompts:
        raise ValueError(f"adapter_names: expected one name for each of {prompts} prompts, got {len(names)}")
    return names


def _answer(
    manager: Manager, inputs: list, adapters: Sequence[str | None] | None, number: int, record_timestamps: bool,
    progress_bar: bool, options: dict[str, Any],
) -> dict[str, Output]:  # fmt: skip
    """The last outputs of all prompts, by request, in the order of the prompts. Prompts wait here while the queue of
    the manager is full. adapters: one a prompt; None: all have the active one, if rows choose any."""
    bound = manager.continuous_batching_config.max_queue_size
    if bound and number > bound:
        raise ValueError(f"num_return_sequences: {number} requests for a prompt, max_queue_size is {bound}")
    waiting, names = deque(enumerate(inputs)), list[str]()
    done: dict[str, Output] = {}
    open_names: set[str] = set()
    refusals: list[Exception] = []
    with tqdm(total=len(inputs) * number, disable=not progress_bar, unit="request") as bar:
        while waiting or open_names:
            while waiting and (manager.queue_room is None or manager.queue_room >= number):
                place, ids = waiting.popleft()
                try:
                    own = options if adapters is None else options | {"adapter_name": adapters[place]}
                    name = manager.add_request(ids, record_timestamps=record_timestamps, **own)
                    names += (added := [*(child_name(name, child) for child in range(number - 1)), name])
                    open_names.update(added)
                except (TypeError, ValueError) as error:
                    refusals.append(error)
                    names.append(name := f"refused_{place}")
                    prompt = [*ids] if isinstance(ids, (list, tuple)) and {*map(type, ids)} <= {int} else []
                    done[name] = Output(
                        name, prompt, error=str(error), status=RequestStatus.FAILED, finish_reason="error"
                    )
                    bar.update(number)
            if len(refusals) == len(inputs):
                raise refusals[0]
            output = manager.get_result(timeout=1) if open_names else None
            if output is not None and output.is_finished() and output.request_id in open_names:
                open_names.remove(output.request_id)
                done[output.request_id] = output
                bar.update(1)
            elif output is None and open_names and not manager.is_running():
                raise RuntimeError("the thread of continuous batching died") from (
                    manager.background_thread_status.fatal_error
                )
    return {name: done[name] for name in names}


def share(ranks: Alone, value: Any, kind: Any) -> Any:
    """The value that the first rank has, on all ranks; the others' does not count. kind: its type, see `from_json`."""
    if ranks.size == 1:
        return value
    numbers = pack(value) if ranks.leads else []
    (count,) = ranks.lead(lambda: [len(numbers)])
    received = list[int]()
    for begin in range(0, count, MOST_NUMBERS):
        received += ranks.lead(partial(operator.getitem, numbers, slice(begin, begin + MOST_NUMBERS)))
    return unpack(received, kind, "what rank 0 shares")


def score(model: Any, ids: Any, temperature: float, adapter_names: Sequence[str | None] | None) -> list[Tensor]:
    """See `Speculation.score`. model: has our ``generate_batch()``."""
    texts = ids.tolist() if isinstance(ids, Tensor) else [*ids]
    if texts and isinstance(texts[0], int):
        texts = [texts]
    # A request has an answer of at least one token, which nobody reads.
    config = GenerationConfig(do_sample=False, max_new_tokens=1, num_return_sequences=1)
    named = {} if adapter_names is None else {"adapter_names": adapter_names}
    outputs = model.generate_batch(
        texts, config, warmup=False, prompt_logprobs=0, logprobs_temperature=temperature, speculation=False, **named
    )
    for number, output in enumerate(outputs.values()):
        if output.error is not None:
            raise ValueError(f"ids[{number}]: {output.error}")
    return [torch.tensor([each.logprob for each in output.prompt_scores]) for output in outputs.values()]
