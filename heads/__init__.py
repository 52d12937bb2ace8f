"""Draft heads: what is trained, saved and shared, and the drafts it makes.

This package stands on the ground of the project: it knows no data and no training loop.
"""

from heads.base import DraftHeads, LossReport
from heads.config import ConfigError, HeadsConfig
from heads.draft import Draft
from heads.forward import TargetOutput
from heads.grow import Budget, Sampler
from heads.identity import TargetIdentity, TargetMismatch
from heads.judge import Teacher, TrainingBatch
from heads.kinds import KINDS, build, make_config
from heads.target import Target

__all__ = [
    "KINDS",
    "Budget",
    "ConfigError",
    "Draft",
    "DraftHeads",
    "HeadsConfig",
    "LossReport",
    "Sampler",
    "Target",
    "TargetIdentity",
    "TargetMismatch",
    "TargetOutput",
    "Teacher",
    "TrainingBatch",
    "build",
    "make_config",
]
