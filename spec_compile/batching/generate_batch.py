"""``generate_batch()``: transformers' arguments and results, and no prompt or error that is lost."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils.logging import tqdm

from .intake import child_name
from .manager import Manager
from .output import Output
from .ranks import share
from .request_options import read_sequences


def generate_batch(
    model: Any, inputs: list, generation_config: GenerationConfig | None, config: ContinuousBatchingConfig | None,
    record_timestamps: bool, progress_bar: bool, persistent_manager: bool, warmup: bool, options: dict[str, Any],
) -> dict[str, Output]:  # fmt: skip
    """See `BatchingMixin.generate_batch`."""
    turns, ranks = model.speculation.engine.turns, model.speculation.options.ranks
    if turns.is_mine:
        raise RuntimeError(
            "generate_batch(): inside pause(), or in a processor, criterion or streamer of a generate(), it would wait "
            "for rounds that wait for this thread; call it afterwards, or call generate()"
        )
    defaults = model.generation_config if generation_config is None else generation_config
    sequences = read_sequences(
        options.get("num_return_sequences"), defaults.num_return_sequences, model.generation_config.num_return_sequences
    )
    if ranks.size > 1:
        ranks.agree("generate_batch()", {"the prompts": [*map(list, inputs)], "the options": sorted(options)})
    names = options.pop("adapter_names", None)
    if names is not None and not isinstance(names, (list, tuple)):
        raise TypeError(f"adapter_names: expected a list of names, one a prompt, got {type(names).__name__}")
    if names is not None and len(names) != len(inputs):
        raise ValueError(f"adapter_names: expected one name for each of {len(inputs)} prompts, got {len(names)}")
    if not inputs:
        return {}
    model.speculation.engine.refuse_changes()
    hints = WorkloadHints(
        max_prompt_length=max((len(ids) for ids in inputs if hasattr(ids, "__len__")), default=0),
        max_generated_length=options.get("max_new_tokens") or defaults.max_new_tokens or 0,
        num_requests=len(inputs) * sequences,
    )
    outputs, failure = {}, None
    try:
        with model.continuous_batching_context_manager(
            generation_config=generation_config, continuous_batching_config=config, warmup=warmup,
            persistent_manager=persistent_manager, workload_hints=hints,
        ) as manager:  # fmt: skip
            if ranks.leads:
                try:
                    outputs = _answer(manager, inputs, names, sequences, record_timestamps, progress_bar, options)
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


def _answer(
    manager: Manager, inputs: list, adapters: Sequence[str | None] | None, sequences: int, record_timestamps: bool,
    progress_bar: bool, options: dict[str, Any],
) -> dict[str, Output]:  # fmt: skip
    """The last outputs of all prompts, by request, in the order of the prompts. Prompts wait here while the queue of
    the manager is full. adapters: one a prompt; None: all have the active one, if rows choose any."""
    bound = manager.continuous_batching_config.max_queue_size
    if bound and sequences > bound:
        raise ValueError(f"num_return_sequences: {sequences} requests for a prompt, max_queue_size is {bound}")
    waiting = deque(enumerate(inputs))
    names: dict[int, list[str]] = {}
    done: dict[str, Output] = {}
    open_names: set[str] = set()
    refusals: list[Exception] = []
    with tqdm(total=len(inputs) * sequences, disable=not progress_bar, unit="request") as bar:
        while waiting or open_names:
            while waiting and (manager.queue_room is None or manager.queue_room >= sequences):
                number, ids = waiting.popleft()
                try:
                    chosen = {} if adapters is None else {"adapter_name": adapters[number]}
                    name = manager.add_request(ids, record_timestamps=record_timestamps, **chosen, **options)
                    names[number] = [*(child_name(name, child) for child in range(sequences - 1)), name]
                    open_names.update(names[number])
                except (TypeError, ValueError) as error:
                    refusals.append(error)
                    names[number] = [f"refused_{number}"]
                    done[names[number][0]] = _refused(names[number][0], ids, error)
                    bar.update(sequences)
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
    return {name: done[name] for number in sorted(names) for name in names[number]}


def _refused(name: str, ids: Any, error: Exception) -> Output:
    """The output of a prompt that was never handed in."""
    prompt = list(ids) if isinstance(ids, (list, tuple)) and {*map(type, ids)} <= {int} else []
    return Output(name, prompt, error=str(error), status=RequestStatus.FAILED, finish_reason="error")
