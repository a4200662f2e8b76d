"""``quantkit cook``: all steps from a model to its quantized files.

    cook         runs the steps that are not up to date
    plan_cook    decides which steps would run, with sizes and times; nothing is written
    read_config  a TOML file as a checked ``Config``
    starter      the text of such a file, for a model

config.py and targets.py: settings; engine.py and state.py: which steps are up to date; steps.py, search_steps.py,
target_steps.py and report_step.py: the steps; run.py: all together. Every step calls a public function of this package
like its command, so its files are those of commands run by hand.
"""

from __future__ import annotations

from quantkit.cook.config import Config, config_from, read_config
from quantkit.cook.engine import Decision, Observer, Step, StepEstimate
from quantkit.cook.run import CookPlan, CookResult, TargetResult, cook, plan_cook
from quantkit.cook.starter import starter
from quantkit.cook.state import StepRecord
from quantkit.cook.targets import Goal, Target, parse_target

__all__ = [
    "Config",
    "CookPlan",
    "CookResult",
    "Decision",
    "TargetResult",
    "StepEstimate",
    "Goal",
    "Observer",
    "Step",
    "StepRecord",
    "Target",
    "config_from",
    "cook",
    "parse_target",
    "plan_cook",
    "read_config",
    "starter",
]
