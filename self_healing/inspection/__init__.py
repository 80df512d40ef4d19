"""Looks at data and weights before the first step: by reading them, not by training."""

from .data import check_data_quality, vocabulary_of
from .findings import Finding, Inspection
from .model import check_model_init


__all__ = ["Finding", "Inspection", "check_data_quality", "check_model_init", "vocabulary_of"]
