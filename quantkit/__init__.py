"""quantkit: quantize, convert and validate GGUF models, offline and byte-exact."""

__version__ = "0.1.0"
