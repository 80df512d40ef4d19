"""Every setting of the library: its name, default and meaning, the values it takes, and its way from and to a file."""

from .given import as_config
from .healing_config import HealingConfig
from .presets import PRESETS
from .setting import SECTIONS, ConfigurationError, Setting


__all__ = ["PRESETS", "SECTIONS", "ConfigurationError", "HealingConfig", "Setting", "as_config"]
