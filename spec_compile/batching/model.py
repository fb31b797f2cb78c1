"""The models that `speculate` makes: our ``generate()``, and continuous batching."""

from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ..capture import adapters
from ..capture.followed import FollowedConfig, follow
from ..runtime.generate import SpeculativeMixin
from .manager import Manager


class BatchingMixin(SpeculativeMixin):
    """Put in front of a model's own class, makes ``generate_batch()`` and continuous batching ours, too."""

    def init_continuous_batching(
        self, generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None, workload_hints=None,
    ) -> Manager:  # fmt: skip
        """A `Manager`, not started, with transformers' arguments; the one that was kept, if there is one.

        Of `continuous_batching_config`, `max_requests_per_batch` (slots), `max_queue_size` and `seed` count; pages and
        graphs are not what our cache has.
        """
        kept = vars(self).get("_cached_continuous_batching_manager")
        if isinstance(kept, Manager):
            return kept
        config = generation_config or self.generation_config
        return Manager(self, config, continuous_batching_config or ContinuousBatchingConfig(), workload_hints)

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
    shadow.__dict__.pop("generate", None)  # one set on the object is run by `SpeculativeMixin.generate`
    return shadow
