"""The inference engine: runs a GGUF model to check, measure and calibrate it."""
