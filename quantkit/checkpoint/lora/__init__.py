"""LoRA adapters saved by PEFT: read, convert to GGUF, or merge into a checkpoint.

* ``low_rank``: an expression that is the product of two factors; rules are applied to it as to any tensor.
* ``peft``: reads and checks a PEFT directory.
* ``convert``: an adapter as a GGUF file. ``merge``: added to the weights of a checkpoint while they are read.
"""
