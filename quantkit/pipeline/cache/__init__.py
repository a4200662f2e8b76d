"""The tensor cache: encoded tensors are kept in a folder and reused by any recipe on any machine.

``keys``: digests of everything that determines encoded rows; ``memo``: known digests of sources; ``store``: the folder;
``run_cache``: the use of one run. Format of an entry: ``formats/cache_entry.py``; jobs that read one:
``pipeline/worker.py``.
"""
