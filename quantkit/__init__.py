"""quantkit: quantize, convert and validate GGUF models, offline and byte-exact.

Every command is a function of the same name: ``quantkit quantize`` is ``quantkit.quantize(...)``.
"""

__version__ = "0.1.0"

from quantkit.compare import compare
from quantkit.errors import QuantkitError
from quantkit.inspect import inspect
from quantkit.merge import merge_up_gate, split_up_gate
from quantkit.quantize import QuantizeOptions, plan_quantize, quantize

__all__ = [
    "QuantizeOptions",
    "QuantkitError",
    "__version__",
    "compare",
    "inspect",
    "merge_up_gate",
    "plan_quantize",
    "quantize",
    "split_up_gate",
]
