"""S3 and compatible stores: MinIO, R2, Ceph, Google's XML interface.

s3fs finds bucket, region, endpoint and credentials (AWS_*, ~/.aws, FSSPEC_S3_*) and makes single requests; only
``retry`` decides on repetitions. Each uploaded part has its MD5, which the server checks, and the returned entity tag
is also compared.
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
from quantkit.formats.remote.common import Facts, Object, entries_of, pinned_length, run_on_loop
from quantkit.formats.remote.retry import Answer, BrokenAnswer, FailureKind, Patience, judge, with_retries

#: The separator of an object's name and its version.
VERSION = "?versionId="
_MD5 = re.compile(r"[0-9a-f]{32}")
#: Minimum and maximum size of a part, and maximum number of parts, of S3.
MIN_PART = 5 << 20
MAX_PART = 5 << 30
MAX_PARTS = 10_000
#: The usual length of a part.
PART = 64 << 20


@dataclass(frozen=True)
class UploadedPart:
    """An uploaded part: its number, from 1, its entity tag and its length."""

    number: int
    tag: str
    nbytes: int


class S3:
    """Objects by ranges of the version that was pinned, and uploads in parts."""

    def __init__(self, kind: Any, configured: Mapping[str, Any]) -> None:
        config = dict(configured.get("config_kwargs") or {})
        # One attempt here, because attempts multiply; checksums that all stores support.
        config |= {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": retry.SILENCE,
            "read_timeout": retry.SILENCE,
        }
        config |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        config |= {"max_pool_connections": 64}
        self.fs = kind(config_kwargs=config, skip_instance_cache=True)
        self.fs.retries = 1

    def _names(self, url: Object) -> dict[str, str]:
        bucket, key, _ = self.fs.split_path(url.address)
        return {"Bucket": bucket, "Key": key}

    def _version(self, url: Object) -> dict[str, str]:
        """Return the version of an object to read, if its address names one."""
        version = url.address.partition(VERSION)[2]
        return {"VersionId": version} if version else {}

    def _call(self, method: str, **kwargs: Any) -> Any:
        return run_on_loop(self.fs.loop, lambda: self.fs._call_s3(method, **kwargs))

    def _request(self, url: Object, method: str, patience: Patience | None = None, **kwargs: Any) -> Any:
        """Return the response to a request about an object; the error names a missing bucket."""
        try:
            return with_retries(url, lambda: self._call(method, **self._names(url), **kwargs), patience)
        except FileNotFoundError:
            self._check_bucket(url)
            raise

    def _check_bucket(self, url: Object) -> None:
        bucket = self._names(url)["Bucket"]
        try:
            self._call("head_bucket", Bucket=bucket)
        except Exception as e:
            if judge(e).kind is FailureKind.MISSING:
                raise FileNotFoundError(2, f"no bucket {bucket}; create it first", str(url)) from None

    # ---------------------------------------------------------------- reading

    def facts(self, url: Object) -> Facts:
        if not self._names(url)["Key"]:
            raise FileNotFoundError(2, "a bucket; give an object in it", str(url))
        head = self._request(url, "head_object", retry.FIRST_LOOK, **self._version(url))
        kms = "kms" in str(head.get("ServerSideEncryption", "")) or head.get("SSECustomerAlgorithm")
        tag = str(head.get("ETag", "")).strip('"')
        return Facts(int(head["ContentLength"]), tag, f"md5:{tag}" if _MD5.fullmatch(tag) and not kms else "")

    def entries(self, url: Object) -> dict[str, Facts | None] | None:
        def ask() -> dict[str, Facts | None]:
            self.fs.invalidate_cache()
            bucket, key = self._names(url).values()
            path = f"{bucket}/{key}".rstrip("/")
            listing = run_on_loop(self.fs.loop, lambda: self.fs._ls(path, detail=True, refresh=True))
            # A name that is both an object and a directory counts as a directory.
            return entries_of([e for e in listing if e["name"].rstrip("/") != path], _listing_facts)

        try:
            return with_retries(url, ask, retry.FIRST_LOOK)
        except FileNotFoundError:
            self._check_bucket(url)
            raise

    def read(self, url: Object, begin: int, end: int) -> bytes:
        pinned, names = url.facts, self._names(url) | self._version(url)

        async def get() -> bytes:
            condition = {"IfMatch": f'"{pinned.tag}"'} if pinned.tag else {}
            answer = await self.fs._call_s3("get_object", Range=f"bytes={begin}-{end - 1}", **names, **condition)
            async with answer["Body"] as body:
                total = str(answer.get("ContentRange", "")).rpartition("/")[2]
                tag = str(answer.get("ETag", "")).strip('"')
                if (total.isdecimal() and int(total) != pinned.size) or (pinned.tag and tag != pinned.tag):
                    raise Answer(412, "another entity tag or length", kind=FailureKind.CHANGED)
                if not total and begin:
                    raise BrokenAnswer("an answer without Content-Range")
                data: bytes = await body.read()
            return data

        return with_retries(url, lambda: pinned_length(run_on_loop(self.fs.loop, get), begin, end))

    # ---------------------------------------------------------------- writing

    def check_writable(self, url: Object) -> None:
        if not self._names(url)["Key"]:
            raise ResourceError(f"{url}: a bucket; give an object in it", "QK-E412")
        if self._version(url):
            raise ResourceError(f"{url}: a version of an object cannot be written: omit ?versionId=", "QK-E412")
        try:
            self._check_bucket(url)
        except FileNotFoundError as e:
            raise ResourceError(f"{url}: {e.strerror}", "QK-E412") from None

    def upload_file(self, url: Object, file: Path) -> None:
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
        """Start a multipart upload; return its id."""
        return str(self._request(url, "create_multipart_upload")["UploadId"])

    def upload(self, url: Object, upload: str, number: int, data: bytes) -> UploadedPart:
        """Upload a part. Raises ProcessLookupError if the upload no longer exists."""
        md5 = hashlib.md5(data, usedforsecurity=False)
        arguments = {"UploadId": upload, "PartNumber": number, "ContentMD5": base64.b64encode(md5.digest()).decode()}

        def send() -> UploadedPart:
            answer = self._call("upload_part", Body=data, **self._names(url), **arguments)
            tag = str(answer["ETag"]).strip('"')
            kms = "kms" in str(answer.get("ServerSideEncryption", "")) or answer.get("SSECustomerAlgorithm")
            if not kms and _MD5.fullmatch(tag) and tag != md5.hexdigest():
                raise BrokenAnswer(f"part {number} was damaged during upload: its checksum differs")
            return UploadedPart(number, tag, len(data))

        return with_retries(url, send)

    def list_parts(self, url: Object, upload: str) -> dict[int, UploadedPart] | None:
        """List the uploaded parts; None if the upload no longer exists."""
        parts: dict[int, UploadedPart] = {}
        after: dict[str, Any] = {}
        while True:
            try:
                page = self._request(url, "list_parts", UploadId=upload, **after)
            except (ProcessLookupError, FileNotFoundError):
                return None
            for part in page.get("Parts", ()):
                parts[part["PartNumber"]] = UploadedPart(part["PartNumber"], part["ETag"].strip('"'), part["Size"])
            if not page.get("IsTruncated"):
                return parts
            after = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def complete(self, url: Object, upload: str, parts: list[UploadedPart], *, overwrite: bool) -> None:
        """Give the object its name. Raises FileExistsError if an object with this name exists and must not be
        overwritten."""
        manifest = {"Parts": [{"PartNumber": part.number, "ETag": f'"{part.tag}"'} for part in parts]}
        only_new = {} if overwrite else {"IfNoneMatch": "*"}

        def send() -> None:
            try:
                self._call(
                    "complete_multipart_upload",
                    **self._names(url),
                    UploadId=upload,
                    MultipartUpload=manifest,
                    **only_new,
                )
            except Exception as e:
                # If only the answer was lost, the object exists and the upload does not.
                if self.is_complete(url, parts):
                    return
                verdict = judge(e)
                if verdict.kind is FailureKind.CHANGED:
                    raise Answer(
                        412, "an object of this name was created in the meantime", kind=FailureKind.PRESENT
                    ) from None
                if only_new and verdict.status == 501:  # a store without conditional requests
                    only_new.clear()
                    raise BrokenAnswer(verdict.reason) from None
                raise

        with_retries(url, send)

    def is_complete(self, url: Object, parts: list[UploadedPart]) -> bool:
        """Return whether an object consists of these parts."""
        try:
            now = with_retries(url, lambda: self._call("head_object", **self._names(url)), retry.FIRST_LOOK)
        except OSError:
            return False
        digests = b"".join(bytes.fromhex(part.tag) if _MD5.fullmatch(part.tag) else b"?" for part in parts)
        expected_tag = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
        return int(now["ContentLength"]) == sum(p.nbytes for p in parts) and str(now["ETag"]).strip('"') == expected_tag

    def abort(self, url: Object, upload: str) -> None:
        """Remove the parts of an upload. Raises OSError."""
        try:
            self._request(url, "abort_multipart_upload", UploadId=upload)
        except (ProcessLookupError, FileNotFoundError):
            return


def _listing_facts(info: Mapping[str, Any]) -> Facts:
    """Return the facts about an object in a listing; those omit encryption, so the tag may not be a checksum."""
    return Facts(int(info["size"]), str(info.get("ETag", "")).strip('"'))


def part_bytes(nbytes: int, usual: int) -> int:
    """Return the part size of an object: the usual one, or a larger one that keeps it within ``MAX_PARTS`` parts."""
    if nbytes > MAX_PARTS * MAX_PART:
        raise ResourceError(f"{nbytes} bytes exceed the limit of an S3 object: use --split-max-size", "QK-E412")
    least = -(-nbytes // MAX_PARTS)
    return usual if least <= usual else -(-least // (1 << 20)) << 20
