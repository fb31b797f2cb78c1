"""Training of draft heads for a model of one's own: `train_draft`."""

from .train import TRAINERS, TrainingResult, train_draft

__all__ = ["TRAINERS", "TrainingResult", "train_draft"]
