"""Models of the runtimes' loaders: whether llama.cpp and ik_llama.cpp load a file, from its header alone.

``load(name, fields, tensors)`` follows a loader as its table describes it (``*.table``, which
scripts/make_loader_tables.py writes from the runtimes' sources) and returns what it would refuse.

* ``table``: the tables, read and compiled
* ``hyperparameters``: the names that their expressions use
* ``metadata``: keys, read with the loaders' rules about kinds
* ``vocabulary``: the requirements on a tokenizer
* ``follow``: the rows applied to a file's header
"""

from quantkit.loaders.follow import architectures, load
from quantkit.loaders.problems import Problem, ProblemKind, describe

__all__ = ["Problem", "ProblemKind", "architectures", "describe", "load"]
