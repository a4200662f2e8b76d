"""Options of verbs, each declared once: for Python, the command line, cook.toml and their help.

Nothing heavy is imported here, so that --help is printed at once.
"""
