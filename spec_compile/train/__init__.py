"""Training of draft heads for a model of one's own: `train_draft`, and `train_while_serving`."""

from .online import train_while_serving
from .train import TRAINERS, TrainingResult, train_draft

__all__ = ["TRAINERS", "TrainingResult", "train_draft", "train_while_serving"]
