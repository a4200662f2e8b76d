"""Files in object stores and on the web, by URL: ``s3://``, ``gs://``, ``hf://``, ``https://``, all schemes of fsspec.

A ``URL`` is a ``Path``, so what reads files takes it as it takes others; ``formats.ranges`` reads its ranges and
``formats.outputs`` its texts. ``located`` makes one of what a user wrote.

What a URL points to is pinned when it is first looked at: size and entity tag. Every later read asks for just that
object, so one that is replaced meanwhile is an error and not a mixture. Requests are repeated, with growing pauses,
where a store is busy or a connection breaks (``retry``). Requests of names carry credentials, messages do not: a URL is
shown without user, password and query. ``file://`` is no store: it names a path of this machine.

| store | reading | writing |
|---|---|---|
| ``s3://`` (AWS, MinIO, R2, Ceph, GCS with HMAC keys) | ranges, If-Match | parts as they are made, then completed |
| ``http://``, ``https://`` | ranges, entity tag of each answer | no |
| ``hf://`` | ranges, checked again at the end | no |
| others of fsspec (``gs://``, ``abfs://``, ``sftp://``) | ranges, checked again at the end | whole, then renamed |
"""

from __future__ import annotations

from quantkit.formats.remote.url import URL, located

__all__ = ["URL", "located"]
