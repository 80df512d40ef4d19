"""Every setting of the library: its name, default and meaning, the values it takes, and its way from and to a file."""

from .healing_config import PRESETS, SECTIONS, HealingConfig, as_config
from .setting import ConfigurationError, Setting


__all__ = ["PRESETS", "SECTIONS", "ConfigurationError", "HealingConfig", "Setting", "as_config"]
