"""The tensor cache: what was encoded once is taken from a folder the next time, by any recipe and on any machine.

``keys`` says what decides the bytes of encoded rows, ``memo`` remembers digests of sources, ``store`` is the folder,
``use`` is one run's part in it. What an entry looks like: ``formats/cache_entry.py``; jobs that take rows from one:
``pipeline/work.py``.
"""
