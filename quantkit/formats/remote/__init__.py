"""Files in object stores and on the web, by URL: ``s3://``, ``gs://``, ``hf://``, ``https://``, all schemes of fsspec.

A ``URL`` is a ``Path``, so every function that reads files accepts it; ``formats.ranges`` reads its ranges and
``formats.outputs`` its texts. ``locate`` creates it from a user's text.

An object is pinned on first access, by size and entity tag. Every later read requests this very object, so a
replacement is an error, not a mix of versions. Requests are repeated, with growing pauses, if a store is busy or a
connection fails (``retry``). Requests carry credentials, messages do not: a URL is shown without user, password and
query. ``file://`` is not a store: it names a local path.

| store | reading | writing |
|---|---|---|
| ``s3://`` (AWS, MinIO, R2, Ceph, GCS with HMAC keys) | ranges, If-Match | parts as they are made, then completed |
| ``http://``, ``https://`` | ranges, entity tag of each answer | no |
| ``hf://`` | ranges, checked again at the end | no |
| others of fsspec (``gs://``, ``abfs://``, ``sftp://``) | ranges, checked again at the end | whole, then renamed |
"""

from __future__ import annotations

from quantkit.formats.remote.url import URL, locate

__all__ = ["URL", "locate"]
