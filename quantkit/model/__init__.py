"""The tasting wing: run a model to see whether its file is right, how good it is, and how fast."""
