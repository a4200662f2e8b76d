"""The whole way from a model to its quantized files: ``quantkit cook``.

    cook         runs the steps that do not stand, and returns what there is
    plan_cook    what stands and what would run, with sizes and times; nothing is written
    read_config  a TOML file as a checked ``Config``
    starter      the text of such a file, for a model

config.py and targets.py say what can be asked for, engine.py and state.py when a step stands, steps.py and
target_steps.py what each does; kitchen.py puts them together. Every step is a verb of this package, called as its
command calls it, so that its files are those of the commands run by hand.
"""

from __future__ import annotations

from quantkit.cook.config import Config, config_from, read_config
from quantkit.cook.engine import Decision, Expected, Observer, Step
from quantkit.cook.kitchen import CookPlan, CookResult, Dish, cook, plan_cook
from quantkit.cook.starter import starter
from quantkit.cook.state import StepRecord
from quantkit.cook.targets import Goal, Target, parse_target

__all__ = [
    "Config",
    "CookPlan",
    "CookResult",
    "Decision",
    "Dish",
    "Expected",
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
