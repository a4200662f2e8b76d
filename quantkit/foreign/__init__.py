"""Foreign code and grammars from files, each run in a process with limits of time and memory.

A chat template is a program; a tokenizer.json drives a package that aborts on damaged tables; YAML and TOML can grow
while being read, and a regular expression while being compiled. ``child.Child`` is the only entry point; the other
modules run inside it, so they import little, and not numpy.
"""
