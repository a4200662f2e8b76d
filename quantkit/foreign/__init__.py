"""Foreign code and grammars from files, each run in a process with limits of time and memory.

A chat template is a program, a tokenizer.json drives a package that aborts where its tables are broken, YAML and TOML
grow while they are read, and a regular expression while it is compiled. ``child.Child`` is the one way in; the modules
beside it are what runs there, so they import little and nothing of numpy.
"""
