"""Settings: what users may ask for, checked where it is given, and what "auto" becomes.

Nothing here imports torch, so a mistake is reported before anything heavy is loaded.
"""

from draftloop.config.engine import EngineConfig
from draftloop.config.env import Environment
from draftloop.config.resolve import Choice, Facts, Resolved, resolve
from draftloop.config.speculative import SpeculativeConfig

__all__ = ["Choice", "EngineConfig", "Environment", "Facts", "Resolved", "SpeculativeConfig", "resolve"]
