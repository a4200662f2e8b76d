"""The tensor cache: tensors encoded once are read from a folder the next time, by any recipe and on any machine.

``keys``: digests of everything that decides encoded rows; ``memo``: known digests of sources; ``store``: the folder;
``run_cache``: the use of one run. Format of an entry: ``formats/cache_entry.py``; jobs that read one:
``pipeline/worker.py``.
"""
