"""S3, and what speaks as S3 does: MinIO, R2, Ceph, Google's XML interface.

s3fs finds bucket, region, endpoint and credentials (AWS_*, ~/.aws, FSSPEC_S3_*) and makes single requests; how often
they are repeated is decided in ``retry`` alone. Each part that is uploaded goes with its MD5, which the server checks,
and the entity tag it answers with is compared, too.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import ResourceError
from quantkit.formats.remote import retry
from quantkit.formats.remote.common import Facts, Object, entries_of, pinned_length, together
from quantkit.formats.remote.retry import Answer, Broken, Meaning, Patience, judge, patiently

_MD5 = re.compile(r"[0-9a-f]{32}")
#: The smallest and the largest part, and the most of them, that S3 takes.
MIN_PART, MAX_PART, MAX_PARTS = 5 << 20, 5 << 30, 10_000
#: The usual length of a part.
PART = 64 << 20


@dataclass(frozen=True)
class Uploaded:
    """A part that is there: its number, from 1, its entity tag and its length."""

    number: int
    tag: str
    nbytes: int


class S3:
    """Objects by ranges of the version that was pinned, and uploads in parts."""

    def __init__(self, kind: Any, configured: Mapping[str, Any]) -> None:
        given = dict(configured.get("config_kwargs") or {})
        # One attempt here, for attempts multiply; checksums as all stores know them.
        given |= {"retries": {"total_max_attempts": 1}, "connect_timeout": retry.SILENCE, "read_timeout": retry.SILENCE}
        given |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        given |= {"max_pool_connections": 64}
        self.fs = kind(config_kwargs=given, skip_instance_cache=True)
        self.fs.retries = 1

    def _names(self, url: Object) -> dict[str, str]:
        bucket, key, _ = self.fs.split_path(url.address)
        return {"Bucket": bucket, "Key": key}

    def _call(self, method: str, **kwargs: Any) -> Any:
        return together(self.fs.loop, lambda: self.fs._call_s3(method, **kwargs))

    def _asked(self, url: Object, method: str, patience: Patience | None = None, **kwargs: Any) -> Any:
        """Return the answer to a request about an object; say which bucket is missing, if that is why."""
        try:
            return patiently(url, lambda: self._call(method, **self._names(url), **kwargs), patience)
        except FileNotFoundError:
            self._check_bucket(url)
            raise

    def _check_bucket(self, url: Object) -> None:
        bucket = self._names(url)["Bucket"]
        try:
            self._call("head_bucket", Bucket=bucket)
        except Exception as e:
            if judge(e).meaning is Meaning.MISSING:
                raise FileNotFoundError(2, f"there is no bucket {bucket}; make it first", str(url)) from None

    # ---------------------------------------------------------------- reading

    def facts(self, url: Object) -> Facts:
        if not self._names(url)["Key"]:
            raise FileNotFoundError(2, "a bucket; name an object in it", str(url))
        found = self._asked(url, "head_object", retry.FIRST_LOOK)
        kms = "kms" in str(found.get("ServerSideEncryption", "")) or found.get("SSECustomerAlgorithm")
        tag = str(found.get("ETag", "")).strip('"')
        return Facts(int(found["ContentLength"]), tag, f"md5:{tag}" if _MD5.fullmatch(tag) and not kms else "")

    def entries(self, url: Object) -> dict[str, Facts | None] | None:
        def ask() -> dict[str, Facts | None]:
            self.fs.invalidate_cache()
            bucket, key = self._names(url).values()
            path = f"{bucket}/{key}".rstrip("/")
            found = together(self.fs.loop, lambda: self.fs._ls(path, detail=True, refresh=True))
            # Of a name that is an object, too, only what lies in it counts.
            return entries_of([e for e in found if e["name"].rstrip("/") != path], _listed)

        try:
            return patiently(url, ask, retry.FIRST_LOOK)
        except FileNotFoundError:
            self._check_bucket(url)
            raise

    def read(self, url: Object, begin: int, end: int) -> bytes:
        pinned, names = url.facts, self._names(url)

        async def get() -> bytes:
            wanted = {"IfMatch": f'"{pinned.tag}"'} if pinned.tag else {}
            found = await self.fs._call_s3("get_object", Range=f"bytes={begin}-{end - 1}", **names, **wanted)
            async with found["Body"] as body:
                total = str(found.get("ContentRange", "")).rpartition("/")[2]
                tag = str(found.get("ETag", "")).strip('"')
                if (total.isdecimal() and int(total) != pinned.size) or (pinned.tag and tag != pinned.tag):
                    raise Answer(412, "another entity tag or length", meaning=Meaning.CHANGED)
                if not total and begin:
                    raise Broken("an answer without Content-Range")
                data: bytes = await body.read()
            return data

        return patiently(url, lambda: pinned_length(together(self.fs.loop, get), begin, end))

    # ---------------------------------------------------------------- writing

    def check_writable(self, url: Object) -> None:
        if not self._names(url)["Key"]:
            raise ResourceError(f"{url}: a bucket; name an object in it")
        try:
            self._check_bucket(url)
        except FileNotFoundError as e:
            raise ResourceError(f"{url}: {e.strerror}") from None

    def put(self, url: Object, file: Path) -> None:
        nbytes, upload = file.stat().st_size, self.begin(url)
        step = part_bytes(nbytes, PART)
        try:
            with open(file, "rb") as data:
                parts = [
                    self.upload(url, upload, number, data.read(step))
                    for number in range(1, max(1, -(-nbytes // step)) + 1)
                ]
            self.complete(url, upload, parts, overwrite=True)
        except BaseException:
            with suppress(OSError):
                self.abort(url, upload)
            raise

    def begin(self, url: Object) -> str:
        """Begin an upload in parts; return what it is called."""
        return str(self._asked(url, "create_multipart_upload")["UploadId"])

    def upload(self, url: Object, upload: str, number: int, data: bytes) -> Uploaded:
        """Upload a part. Raises ProcessLookupError if there is no such upload any more."""
        md5 = hashlib.md5(data, usedforsecurity=False)
        given = {"UploadId": upload, "PartNumber": number, "ContentMD5": base64.b64encode(md5.digest()).decode()}

        def send() -> Uploaded:
            found = self._call("upload_part", Body=data, **self._names(url), **given)
            tag = str(found["ETag"]).strip('"')
            kms = "kms" in str(found.get("ServerSideEncryption", "")) or found.get("SSECustomerAlgorithm")
            if not kms and _MD5.fullmatch(tag) and tag != md5.hexdigest():
                raise Broken(f"part {number} arrived damaged: its checksum is not that of what was sent")
            return Uploaded(number, tag, len(data))

        return patiently(url, send)

    def uploaded(self, url: Object, upload: str) -> dict[int, Uploaded] | None:
        """Return the parts of an upload that are there; None if there is no such upload any more."""
        found: dict[int, Uploaded] = {}
        after: dict[str, Any] = {}
        while True:
            try:
                page = self._asked(url, "list_parts", UploadId=upload, **after)
            except (ProcessLookupError, FileNotFoundError):
                return None
            for part in page.get("Parts", ()):
                found[part["PartNumber"]] = Uploaded(part["PartNumber"], part["ETag"].strip('"'), part["Size"])
            if not page.get("IsTruncated"):
                return found
            after = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def complete(self, url: Object, upload: str, parts: list[Uploaded], *, overwrite: bool) -> None:
        """Give the object its name. Raises FileExistsError if one has it, and is not to be overwritten."""
        listed = {"Parts": [{"PartNumber": part.number, "ETag": f'"{part.tag}"'} for part in parts]}
        only_new = {} if overwrite else {"IfNoneMatch": "*"}

        def send() -> None:
            try:
                self._call(
                    "complete_multipart_upload", **self._names(url), UploadId=upload, MultipartUpload=listed, **only_new
                )
            except Exception as e:
                # An answer that was lost: then it is there, and the upload is not.
                if self.is_complete(url, parts):
                    return
                verdict = judge(e)
                if verdict.meaning is Meaning.CHANGED:
                    raise Answer(412, "an object of this name has appeared", meaning=Meaning.PRESENT) from None
                if only_new and "501" in verdict.why:  # a store without conditions
                    only_new.clear()
                    raise Broken(verdict.why) from None
                raise

        patiently(url, send)

    def is_complete(self, url: Object, parts: list[Uploaded]) -> bool:
        """Tell whether an object is what these parts make."""
        try:
            now = patiently(url, lambda: self._call("head_object", **self._names(url)), retry.FIRST_LOOK)
        except OSError:
            return False
        digests = b"".join(bytes.fromhex(part.tag) if _MD5.fullmatch(part.tag) else b"?" for part in parts)
        wanted = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
        return int(now["ContentLength"]) == sum(p.nbytes for p in parts) and str(now["ETag"]).strip('"') == wanted

    def abort(self, url: Object, upload: str) -> None:
        """Remove the parts of an upload. Raises OSError."""
        try:
            self._asked(url, "abort_multipart_upload", UploadId=upload)
        except (ProcessLookupError, FileNotFoundError):
            return


def _listed(info: Mapping[str, Any]) -> Facts:
    """Return what a listing says of an object; not of its encryption, so its tag may be no checksum."""
    return Facts(int(info["size"]), str(info.get("ETag", "")).strip('"'))


def part_bytes(nbytes: int, usual: int) -> int:
    """Return the length of the parts of an object: the usual one, or what makes at most ``MAX_PARTS`` of them."""
    if nbytes > MAX_PARTS * MAX_PART:
        raise ResourceError(f"{nbytes} bytes are more than S3 holds in one object: give --split-max-size")
    least = -(-nbytes // MAX_PARTS)
    return usual if least <= usual else -(-least // (1 << 20)) << 20
