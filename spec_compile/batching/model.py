"""The models that `speculate` makes: our ``generate()``, and continuous batching."""

from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ..capture import adapters
from ..capture.followed import FollowedConfig, follow
from ..capture.watch import KEPT
from ..runtime.generate import SpeculativeMixin
from .generate_batch import generate_batch
from .manager import Manager
from .output import Output


class BatchingMixin(SpeculativeMixin):
    """Put in front of a model's own class, makes ``generate_batch()`` and continuous batching ours, too."""

    def init_continuous_batching(
        self, generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None, workload_hints=None,
    ) -> Manager:  # fmt: skip
        """A `Manager`, not started, with transformers' arguments; the one that was kept, if there is one.

        `max_requests_per_batch` (slots), `max_queue_size`, `seed` and `return_logprobs` of `continuous_batching_config`
        count; pages and graphs are not what our cache has.
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

        inputs: token ids of each prompt. options: those of `Manager.add_request`, for all prompts, and `adapter_names`,
        a list with the `adapter_name` of each prompt. The other arguments are transformers'. A prompt that is refused
        has an output with `status` FAILED and the reason in `error`; the others are answered. On several ranks all of
        them call this alike, and all return the same.
        Raises what `Manager.add_request` raises if every prompt is refused, and RuntimeError if the model has
        changed since speculate(), or if the thread dies.
        """
        return generate_batch(
            self, inputs, generation_config, continuous_batching_config, record_timestamps, progress_bar,
            persistent_manager, warmup, options,
        )  # fmt: skip

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Give back the memory of a manager that was kept, and of the rows that an earlier one has left."""
        super().destroy_cached_continuous_batching_manager()
        self.speculation.engine.idle_batch = None


def shadow(model: PreTrainedModel) -> PreTrainedModel:
    """An object of a subclass with our generate(), which shares all modules and parameters of the model."""
    cls = type(model)
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    shadow: Any = adapters.shallow(model, type(cls.__name__, (BatchingMixin, cls), names))
    follow(shadow, FollowedConfig(model))
    for name in ("generate", KEPT):  # a generate() set on the object is run by `SpeculativeMixin.generate`
        shadow.__dict__.pop(name, None)
    return shadow
