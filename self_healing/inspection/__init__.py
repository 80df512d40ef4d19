"""Looks at data and weights before the first step: by reading them, not by training."""

from .data import Finding, Inspection, check_data_quality, check_model_init


__all__ = ["Finding", "Inspection", "check_data_quality", "check_model_init"]
