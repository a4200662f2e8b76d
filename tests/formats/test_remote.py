"""Models in object stores: the same bytes as on this machine, or one error, whatever the network does.

moto runs as a process of its own, once for the module; a proxy in front of it counts and breaks (object_store.py).
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner, Result
from fsspec.implementations.local import LocalFileSystem
from refusals import check_refused, refuses
from test_stitch import write_map

from checkpoints import write_checkpoint
from object_store import FAULTS, STALL, Proxy, Request, hub, moto_server
from quantkit.cli import cli
from quantkit.errors import FormatError, QuantkitError, ResourceError
from quantkit.formats.files import check_unchanged
from quantkit.formats.gguf import open_gguf
from quantkit.formats.imatrix import read_imatrix
from quantkit.formats.outputs import check_apart, lock_path, read_whole
from quantkit.formats.remote import URL, locate, reader, retry, s3, stores
from quantkit.formats.remote import url as url_module
from quantkit.formats.remote.retry import Answer, FailureKind, Patience, judge, with_retries
from quantkit.hash import hash  # noqa: A004
from quantkit.pipeline import jobs, spool
from quantkit.quantize import QuantizeOptions, quantize
from quantkit.stitch import stitch
from small_models import llama_fields, llama_tensors, write_model

SECRET, KEY = "hunter2-secret-key", "AKIAHUNTER2"
PART = 64 << 10
OPTIONS = QuantizeOptions(no_provenance=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    """The proxy before a server with a bucket; environment and limits as these tests need them."""
    with moto_server() as port, pytest.MonkeyPatch.context() as patch:
        proxy = Proxy(port)
        environment = {"AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        for name, value in {**environment, "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null"}.items():
            patch.setenv(name, value)
        patch.setattr(retry, "SILENCE", 10.0)
        patch.setattr(retry, "PATIENCE", Patience(attempts=6, first=0.02, longest=0.1, total_seconds=20))
        patch.setattr(retry, "FIRST_LOOK", Patience(attempts=6, first=0.02, longest=0.1, total_seconds=20))
        patch.setattr(s3, "PART", PART)
        patch.setattr(reader, "BLOCK", 256 << 10)
        stores._stores.clear()
        call(proxy, "create_bucket")
        yield proxy
        stores._stores.clear()
        proxy.close()


@pytest.fixture
def proxy(server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy, breaking nothing; an empty bucket, and a spool of this test."""
    monkeypatch.setattr(url_module, "default_spool", lambda: tmp_path / "default-spool")
    monkeypatch.setattr(reader, "_blocks", None)
    server.clear()
    for key in keys():
        call(server, "delete_object", Key=key)
    for upload in uploads():
        call(server, "abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
    server.clear()
    yield server
    server.clear()


@pytest.fixture
def large_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For files of many megabytes, where it does not matter where they are cut: requests are what takes long."""
    monkeypatch.setattr(s3, "PART", 1 << 20)
    monkeypatch.setattr(reader, "BLOCK", 1 << 20)


def call(proxy: Proxy | None, method: str, **kwargs: Any) -> Any:
    store = locate("s3://models/x").store  # type: ignore[attr-defined]
    return with_retries("the test", lambda: store._call(method, Bucket="models", **kwargs))


def put_object(name: str, data: bytes | Path) -> str:
    call(None, "put_object", Key=name, Body=data if isinstance(data, bytes) else data.read_bytes())
    return f"s3://models/{name}"


def get(name: str) -> bytes:
    return URL(f"s3://models/{name}").read_bytes()


def keys() -> list[str]:
    return [entry["Key"] for entry in call(None, "list_objects_v2").get("Contents", ())]


def uploads() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = call(None, "list_multipart_uploads").get("Uploads", [])
    return entries


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, args)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 5 MB."""
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", llama_tensors(layers=4), llama_fields(layers=4))


@pytest.fixture(scope="module")
def expected(model: Path) -> bytes:
    """What Q4_K_M of it is on this machine: 22 parts."""
    out = model.with_name("q4.gguf")
    quantize(model, out, "Q4_K_M", OPTIONS)
    return out.read_bytes()


# ---------------------------------------------------------------- names


def test_urls_behave_like_paths() -> None:
    url = locate("s3://bucket//deep/model-00001-of-00002.gguf")
    assert isinstance(url, URL)
    assert str(url) == "s3://bucket//deep/model-00001-of-00002.gguf"
    assert (url.name, url.suffix, url.stem) == ("model-00001-of-00002.gguf", ".gguf", "model-00001-of-00002")
    assert str(url.with_name("b.gguf")) == "s3://bucket//deep/b.gguf"
    assert str(url.parent) == "s3://bucket//deep"
    assert str(locate("hf://org/model") / "config.json") == "hf://org/model/config.json"
    assert locate(url) is url
    assert locate("s3://b/k") == locate("s3://b/k")
    assert locate("s3://b/k") != locate("s3://b/l")
    assert not isinstance(locate("plain/s3:/x"), URL)
    for text, path in {
        **{"file:///x/m": "/x/m", "FILE://localhost/x/m": "/x/m", "local:///x/m": "/x/m", "file://m": "m"},
        **{"file:///x/a%20b?c": "/x/a%20b?c", "file:///": "/"},
    }.items():
        assert locate(text) == Path(path)
        assert not isinstance(locate(text), URL)


ALIASES = {
    "s3://b/x/m.gguf": ("s3a://b/x/m.gguf", "S3://b/x/m.gguf", "s3:///b/x/m.gguf", "s3://b/x/m.gguf/"),
    "s3://b/m": ("s3://b/m?versionId=null", "s3n://b/m?versionId=3", "s3://b/m/"),
    "gs://b/m": ("gcs://b/m", "GS://b/m//"),
    "abfs://c@a.dfs.core.windows.net/m": ("az://c@a.dfs.core.windows.net/m", "ABFSS://c@a.dfs.core.windows.net/m"),
    "sftp://h/x/m": ("ssh://h/x/m", "sftp://h/x/../x/./m", "sftp://h//x//m"),
    "https://host/m": ("HTTPS://Host/m", "https://user:pass@host/m", "https://host/m?token=1"),
}


@pytest.mark.parametrize("text", ALIASES)
def test_an_object_has_one_identity(text: str) -> None:
    """So it is refused as its own output, and one lock is for all."""
    url = locate(text)
    for alias in map(locate, ALIASES[text]):
        assert isinstance(url, URL)
        assert isinstance(alias, URL)
        assert alias.identity == url.identity
        assert lock_path(alias) == lock_path(url)
        with refuses(ResourceError, "QK-E403"):
            check_apart([alias], [url])
    for neighbour in (f"{text}2", text.replace("m", "M"), text.replace("/m", "//n/m")):
        check_apart([text], [neighbour])


@pytest.mark.parametrize(
    "text",
    [
        f"s3://{KEY}:{SECRET}@bucket/m.gguf",
        f"s3://{KEY}:aa/{SECRET}/bb@bucket/m.gguf",
        f"S3A://{SECRET}@bucket/m.gguf",
        f"gs://user:{SECRET}@bucket/m.gguf",
        f"sftp://user:{SECRET}@host/m.gguf",
        f"https://user:aa/{SECRET}@host/m.gguf",
    ],
)
def test_a_url_with_a_password_is_refused_and_not_shown(text: str, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "o.gguf"
    for args in (
        *(("quantize", model, text, "Q8_0"), ("quantize", text, out, "Q8_0"), ("inspect", text)),
        *(("imatrix", "merge", text, "-o", out), ("imatrix", "show", text), ("perplexity", "-m", text, "-p", "a")),
        *(("quantize", model, out, "Q8_0", "--imatrix", text), ("perplexity", "-m", model, "-p", "a", "--json", text)),
        *(("convert", text, out), ("compare", text, model), ("kld", "-m", model, "--base", text)),
    ):
        result = run(*args)
        assert result.exit_code in (1, 2), result.output
        assert SECRET not in result.output
        check_refused(result.output, "QK-E412 AWS_SECRET_ACCESS_KEY")
        assert not isinstance(result.exception, ResourceError)
    assert not list(tmp_path.iterdir())
    for verb in (lambda: quantize(model, text, "Q8_0"), lambda: open_gguf(text), lambda: read_whole(text)):
        with pytest.raises(ResourceError) as raised:
            verb()
        assert SECRET not in str(raised.value)


def test_object_versions_are_read_only(proxy: Proxy, model: Path) -> None:
    call(None, "put_bucket_versioning", VersioningConfiguration={"Status": "Enabled"})
    try:
        name = put_object("v.gguf", b"first")
        version = call(None, "head_object", Key="v.gguf")["VersionId"]
        put_object("v.gguf", b"second")
        assert URL(f"{name}?versionId={version}").read_bytes() == b"first"
        assert URL(name).read_bytes() == b"second"
        with refuses(ResourceError, "QK-E412 ?versionId=", version):
            quantize(model, f"{name}?versionId={version}", "Q8_0", OPTIONS, overwrite=True)
        assert URL(name).read_bytes() == b"second"
    finally:
        call(None, "put_bucket_versioning", VersioningConfiguration={"Status": "Suspended"})
    assert not isinstance(locate("s3://"), URL)


def test_a_signed_url_is_not_shown() -> None:
    url = locate("https://user:pass@host/models/a.gguf?X-Amz-Signature=abc")
    for text in (str(url), repr(url), os.fspath(url), str(url.with_name("b.gguf")), str(url.local)):  # type: ignore[attr-defined]
        assert "abc" not in text
        assert "pass" not in text
    assert url.name == "a.gguf"
    for text in ("gs://b/a?sig=abc", "abfs://c@a.dfs.core.windows.net/a?sig=abc", "s3://b/a?X-Amz-Signature=abc"):
        assert "abc" not in str(locate(text))
    assert str(locate("s3://b/a?versionId=3")) == "s3://b/a?versionId=3"
    assert pickle.loads(pickle.dumps(url)).address == url.address  # type: ignore[attr-defined]


def test_pinned_versions_are_pickled(proxy: Proxy) -> None:
    url = locate(put_object("a", b"first"))
    assert url.stat().st_size == 5
    copy = pickle.loads(pickle.dumps(url))
    put_object("a", b"other")
    with refuses(FormatError, "QK-E109 412"):
        copy.read_range(0, 5)


# ---------------------------------------------------------------- failures and patience


def test_retry_after_is_respected_and_pauses_grow() -> None:
    patience = Patience(first=1, longest=10)
    assert patience.pause(1, 3.5) >= 3.5
    pauses = {n: [patience.pause(n, None) for _ in range(200)] for n in (1, 3, 9)}
    assert max(pauses[1]) <= 1
    assert 1 < max(pauses[3]) <= 4
    assert 4 < max(pauses[9]) <= 10
    assert len(set(pauses[3])) > 100  # random, so that many clients do not come back at once


def test_retries_end_within_the_time_limit() -> None:
    pauses = []

    def busy() -> None:
        pauses.append(time.monotonic())
        raise Answer(503, wait="30")

    began = time.monotonic()
    with pytest.raises(OSError, match=r"HTTP 503; .* 1 attempts"):
        with_retries("x", busy, Patience(total_seconds=5))
    assert time.monotonic() - began < 2
    with pytest.raises(OSError, match="after 3 attempts"):
        with_retries("x", lambda: (_ for _ in ()).throw(ConnectionResetError()), Patience(attempts=3, first=0.01))


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (ConnectionResetError(), FailureKind.RETRY),
        (TimeoutError(), FailureKind.RETRY),
        (Answer(429), FailureKind.RETRY),
        (Answer(401), FailureKind.DENIED),
        (Answer(412), FailureKind.CHANGED),
        (PermissionError(), FailureKind.DENIED),
        (FileNotFoundError(), FailureKind.MISSING),
        (ValueError(SECRET), FailureKind.UNKNOWN),
    ],
)
def test_failures_are_classified(failure: Exception, kind: FailureKind) -> None:
    verdict = judge(failure)
    assert verdict.kind is kind
    assert SECRET not in verdict.reason


# ---------------------------------------------------------------- the same bytes


def test_quantize_from_store_to_store(
    proxy: Proxy, large_parts: None, tiny_moe: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an importance matrix, errors measured and in shards; each object appears with the last request about it."""
    source, imatrix = put_object("in/moe.gguf", tiny_moe), put_object("in/imatrix.gguf", data / "tiny-moe-imatrix.gguf")
    options = ("IQ4_XS", "--no-provenance", "--hide-imatrix", "--split-max-size", "2M", "--measure-error", "--json")
    local = run("quantize", tiny_moe, tmp_path / "q.gguf", "--imatrix", data / "tiny-moe-imatrix.gguf", *options)
    result = run(
        "quantize", source, "s3://models/out/q.gguf", "--imatrix", imatrix, *options, "--spool", tmp_path / "spool"
    )
    assert result.exit_code == 0, result.output
    files = sorted(tmp_path.glob("q-*.gguf"))
    assert len(files) > 1
    assert [k for k in keys() if k.startswith("out/")] == [f"out/{f.name}" for f in files]
    for file in files:
        assert get(f"out/{file.name}") == file.read_bytes()
    assert json.loads(result.stdout)["classes"] == json.loads(local.stdout)["classes"]
    assert not list((tmp_path / "spool").iterdir())
    assert uploads() == []
    assert KEY not in result.output


def test_provenance_differs_only_in_the_fingerprint(
    proxy: Proxy, large_parts: None, tiny_moe: Path, tmp_path: Path
) -> None:
    source = put_object(tiny_moe.name, tiny_moe)
    quantize(tiny_moe, tmp_path / "q.gguf", "Q8_0")
    quantize(source, "s3://models/q.gguf", "Q8_0")
    with open_gguf(tmp_path / "q.gguf") as a, open_gguf("s3://models/q.gguf") as b:
        assert [k for k in a.fields if a.get(k) != b.get(k)] == ["quantkit.quantize.source.fingerprint"]


def test_planning_reads_only_headers(proxy: Proxy, tiny_moe: Path) -> None:
    source = put_object("moe.gguf", tiny_moe)
    proxy.clear()
    result = run("quantize", source, "s3://models/q.gguf", "Q4_K_M", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["refused"] is None
    assert 100_000 < proxy.served <= 1 << 20  # of 18 MB
    assert len(proxy.requests) < 10
    assert not [r for r in proxy.requests if r.method in ("PUT", "POST", "DELETE")]
    assert run("inspect", source).exit_code == 0
    assert proxy.served <= 2 << 20


def test_convert_from_store_to_store(proxy: Proxy, large_parts: None, tmp_path: Path) -> None:
    folder = write_checkpoint("Mixtral-8x7B-chat-xl", tmp_path / "in")
    for file in folder.iterdir():
        put_object(f"hub/{folder.name}/{file.name}", file)
    for type_name in ((), ("Q4_K", "--no-provenance")):
        local = run("convert", folder, tmp_path / "local.gguf", *type_name, "--overwrite")
        assert local.exit_code == 0, local.output
        proxy.clear()
        paths = f"s3://models/hub/{folder.name}", "s3://models/out/m.gguf"
        dry = run("convert", *paths, *type_name, "--overwrite", "--dry-run")
        assert dry.exit_code == 0, dry.output
        result = run("convert", *paths, *type_name, "--overwrite")
        assert result.exit_code == 0, result.output
        assert get("out/m.gguf") == (tmp_path / "local.gguf").read_bytes()
    rerun = run("convert", paths[0])
    assert rerun.exit_code == 0, rerun.output
    assert [k for k in keys() if k.endswith(".gguf") and k.startswith("hub/")]


def test_merge_compare_and_importance(
    proxy: Proxy, large_parts: None, tiny_moe: Path, data: Path, tmp_path: Path
) -> None:
    source, imatrix = put_object("moe.gguf", tiny_moe), put_object("imatrix.dat", data / "tiny-moe-imatrix.dat")
    assert run("merge-up-gate", tiny_moe, tmp_path / "m.gguf").exit_code == 0
    args = (source, "s3://models/m.gguf", "--imatrix", imatrix, "--imatrix-out", "s3://models/merged.dat")
    result = run("merge-up-gate", *args)
    assert result.exit_code == 0, result.output
    assert get("m.gguf") == (tmp_path / "m.gguf").read_bytes()
    compared = run("compare", "s3://models/m.gguf", tmp_path / "m.gguf")
    assert compared.exit_code == 0, compared.output
    assert "identical" in compared.output
    assert run("imatrix", "show", imatrix).output == run(
        "imatrix", "show", data / "tiny-moe-imatrix.dat"
    ).output.replace(str(data / "tiny-moe-imatrix.dat"), imatrix)
    both = run("imatrix", "merge", imatrix, imatrix, "-o", "s3://models/both.gguf")
    assert both.exit_code == 0, both.output
    assert read_imatrix("s3://models/both.gguf").chunk_count == 2 * read_imatrix(imatrix).chunk_count


def test_split_sources_and_keeping_the_split(proxy: Proxy, large_parts: None, tiny_moe: Path, tmp_path: Path) -> None:
    assert run("quantize", tiny_moe, tmp_path / "a.gguf", "COPY", "--split-max-size", "6M").exit_code == 0
    shards = sorted(tmp_path.glob("a-*.gguf"))
    for shard in shards:
        put_object(shard.name, shard)
    quantize(shards[0], tmp_path / "b.gguf", "Q8_0", QuantizeOptions(no_provenance=True, keep_split=True))
    source = f"s3://models/{shards[1].name}"
    quantize(source, "s3://models/b.gguf", "Q8_0", QuantizeOptions(no_provenance=True, keep_split=True))
    for shard in tmp_path.glob("b-*.gguf"):
        assert get(shard.name) == shard.read_bytes()
    call(None, "delete_object", Key=shards[0].name)
    with refuses(FormatError, "QK-E104 1"):
        open_gguf(source)


def test_the_cache_serves_objects(proxy: Proxy, model: Path, expected: bytes, tmp_path: Path) -> None:
    """What is known of an object is neither read nor encoded again, until another takes its place."""
    source, settings = put_object("moe.gguf", model), dict[str, Any](cache=tmp_path / "cache", overwrite=True)
    proxy.clear()
    first = quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS, **settings)
    read = proxy.served
    assert get("q.gguf") == expected
    proxy.clear()
    rerun = quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS, **settings)
    assert proxy.served < 0.6 * read  # the header, both ends of tensors, and norms, in blocks
    assert get("q.gguf") == expected
    assert first.run.cache is not None
    assert rerun.run.cache is not None
    assert first.run.cache.stored == first.run.cache.tensors == rerun.run.cache.hits > 20
    data = bytearray(model.read_bytes())
    with open_gguf(model) as opened:
        offset = opened.tensors["blk.1.ffn_up.weight"].offset
    data[offset + 600 : offset + 602] = b"\0\0"  # of the same size, with the same ends of tensors
    put_object("moe.gguf", bytes(data))
    path = tmp_path / "in.gguf"
    path.write_bytes(data)
    quantize(path, tmp_path / "other.gguf", "Q4_K_M", OPTIONS)
    changed = quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS, **settings)
    assert get("q.gguf") == (tmp_path / "other.gguf").read_bytes() != expected
    assert changed.run.cache is not None
    assert changed.run.cache.hits == changed.run.cache.tensors - 1


# ---------------------------------------------------------------- a network that fails


def now_and_then(fault: str, period: int = 4) -> Callable[[Request], str | None]:
    """Return a fault that every fourth request of each kind meets, first ones included, none more than three times."""
    counts, met = Counter[str](), Counter[tuple[object, ...]]()

    def choose(request: Request) -> str | None:
        kind = "part" if request.is_part else request.method
        counts[kind] += 1
        if fault in ("short", "cut") and request.method != "GET":
            return None
        if fault == "flip" and not request.is_part:
            return None
        byte_range = request.headers.get("Range") or request.headers.get("range")
        key = request.method, request.path, byte_range, *request.query.get("partNumber", ())
        if counts[kind] % period != 1 or met[key] == 3:
            return None
        met[key] += 1
        return fault

    return choose


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "stall"])
def test_transient_faults_do_not_change_the_output(proxy: Proxy, model: Path, expected: bytes, fault: str) -> None:
    source = put_object("moe.gguf", model)
    proxy.clear()
    proxy.fault = now_and_then(fault)
    quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
    faulty = [r for r in proxy.requests if r.fault]
    proxy.clear()
    assert len(faulty) >= 5
    assert get("q.gguf") == expected
    for upload in uploads():  # one whose name was lost: there is nothing in it
        assert fault == "lost"
        assert "Parts" not in call(None, "list_parts", Key="q.gguf", UploadId=upload["UploadId"])


def test_a_silent_server_is_retried(
    proxy: Proxy, model: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "SILENCE", STALL / 2)
    monkeypatch.setattr(stores, "_stores", {})
    source = put_object("moe.gguf", model)
    proxy.clear()
    proxy.fault = lambda request: "stall" if len(proxy.requests) in (1, 9, 21) else None
    quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
    assert len([r for r in proxy.requests if r.fault]) == 3
    proxy.clear()
    assert get("q.gguf") == expected


def test_random_faults_do_not_change_the_output(proxy: Proxy, model: Path, expected: bytes) -> None:
    """The right file or one error, and a run that ended with an error goes on."""
    source, rng = put_object("moe.gguf", model), random.Random(3)
    kinds, endings = ["reset", "lost", "503", "429", "cut", "short"], []
    for turn in range(3):
        proxy.clear()
        proxy.fault = lambda request, share=0.15 * turn: rng.choice(kinds) if rng.random() < share else None
        try:
            quantize(source, f"s3://models/{turn}.gguf", "Q4_K_M", OPTIONS)
            endings.append("whole")
        except (OSError, QuantkitError) as e:
            endings.append(str(e))
            proxy.clear()
            assert f"{turn}.gguf" not in keys()
            quantize(source, f"s3://models/{turn}.gguf", "Q4_K_M", OPTIONS, resume=True)
        proxy.clear()
        assert get(f"{turn}.gguf") == expected
    assert endings[0] == "whole"


@pytest.mark.parametrize(("fault", "message"), [("503", "HTTP 503"), ("reset", "attempts"), ("flip", "damaged")])
def test_uploads_that_never_succeed_are_one_error(
    proxy: Proxy, model: Path, expected: bytes, fault: str, message: str
) -> None:
    source = put_object("moe.gguf", model)
    proxy.clear()
    proxy.fault = lambda r: fault if r.is_part and len([x for x in proxy.requests if x.is_part]) > 5 else None
    began = time.monotonic()
    with pytest.raises(OSError, match=message) as raised:
        quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
    assert time.monotonic() - began < 15
    assert "secret-of-the-server" not in str(raised.value)
    proxy.clear()
    assert "q.gguf" not in keys()
    assert len(uploads()) == 1  # kept for --resume
    quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS, resume=True)
    assert len([r for r in proxy.requests if r.is_part]) < -(-len(expected) // PART)
    assert get("q.gguf") == expected
    assert uploads() == []


@pytest.mark.parametrize("fault", ["cut", "short", "429", "403"])
def test_reads_that_never_succeed_are_one_error(proxy: Proxy, model: Path, fault: str) -> None:
    source = put_object("moe.gguf", model)
    proxy.clear()
    proxy.fault = lambda r: fault if r.method == "GET" and r.path.endswith("moe.gguf") else None
    with refuses(FormatError, "QK-E405 moe.gguf"):
        open_gguf(source)
    proxy.fault = lambda r: fault if r.method == "GET" and len(proxy.requests) > 14 else None
    with pytest.raises(OSError, match=r"attempts|denied"):
        quantize(source, "s3://models/q.gguf", "Q8_0", OPTIONS)
    proxy.clear()
    assert "q.gguf" not in keys()


def test_small_files_are_checked_by_their_checksum(proxy: Proxy, data: Path) -> None:
    name = put_object("imatrix.gguf", data / "tiny-moe-imatrix.gguf")
    proxy.clear()
    proxy.fault = lambda r: (
        "flip" if r.method == "GET" and len([x for x in proxy.requests if x.method == "GET"]) == 0 else None
    )
    assert locate(name).read_bytes() == (data / "tiny-moe-imatrix.gguf").read_bytes()
    proxy.fault = lambda r: "flip" if r.method == "GET" else None
    with refuses(FormatError, "QK-E412 md5"):
        locate(name).read_bytes()


def test_a_replaced_object_is_one_error(proxy: Proxy, model: Path) -> None:
    source, replacement = put_object("moe.gguf", model), model.read_bytes()[:-1] + b"\1"
    proxy.clear()
    replaced: list[bool] = []

    def replace(request: Request) -> None:
        if request.is_part and not replaced:
            replaced.append(True)
            proxy.before = lambda request: None
            put_object("moe.gguf", replacement)

    proxy.before = replace
    with refuses(FormatError, "QK-E109 moe.gguf"):
        quantize(source, "s3://models/q.gguf", "Q8_0", OPTIONS)
    proxy.clear()
    assert keys() == ["moe.gguf"]
    assert uploads() == []


# ---------------------------------------------------------------- killed, resumed, and two at a time

_PROGRAM = """
    from pathlib import Path
    from quantkit.formats.remote import locate, s3
    from quantkit.quantize import QuantizeOptions, quantize
    s3.PART = {part}
    quantize({source!r}, locate({output!r}, Path({spool!r})), "Q4_K_M", QuantizeOptions(no_provenance=True), threads=2)
"""


def killed_after(proxy: Proxy, source: str, parts: int) -> None:
    """Run in another process, and kill it when it has uploaded some parts."""
    where = {"source": source, "output": "s3://models/q.gguf", "spool": str(url_module.default_spool())}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(_PROGRAM.format(part=PART, **where))])

    def stop(request: Request) -> None:
        if request.is_part and len([r for r in proxy.requests if r.is_part]) >= parts:
            process.send_signal(signal.SIGKILL)

    proxy.before = stop
    assert process.wait(60) == -signal.SIGKILL
    proxy.clear()


@pytest.mark.parametrize("parts", [1, 14])
def test_a_killed_run_continues_its_upload(
    proxy: Proxy, model: Path, expected: bytes, parts: int, tmp_path: Path
) -> None:
    source = put_object("moe.gguf", model)
    proxy.clear()
    killed_after(proxy, source, parts)
    assert "q.gguf" not in keys()
    (upload,) = uploads()
    stored_parts = {
        p["PartNumber"] for p in call(None, "list_parts", Key="q.gguf", UploadId=upload["UploadId"]).get("Parts", ())
    }
    assert len(stored_parts) >= parts - spool.UPLOADERS
    with refuses(ResourceError, "QK-E408 --resume"):
        quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
    journal = next(url_module.default_spool().glob("*.journal")).read_text()
    assert SECRET not in journal
    assert KEY not in journal
    noted = {note["part"] for line in journal.splitlines() if "part" in (note := json.loads(line).get("note", {}))}
    proxy.clear()
    result = quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS, resume=True)
    sent_parts = {int(r.query["partNumber"][0]) for r in proxy.requests if r.is_part}
    assert not [r for r in proxy.requests if r.method == "POST" and "uploads" in r.query]
    assert sent_parts == set(range(1, -(-len(expected) // PART) + 1)) - noted
    assert get("q.gguf") == expected
    assert result.run.resumed >= (0 if parts < 14 else 1)
    assert uploads() == []
    assert not list(url_module.default_spool().iterdir())


def test_resuming_measures_all_errors(proxy: Proxy, model: Path, expected: bytes) -> None:
    source = put_object("moe.gguf", model)
    full = quantize(source, "s3://models/m.gguf", "Q4_K_M", OPTIONS, measure_error=True)
    proxy.clear()
    proxy.fault = lambda r: "403" if r.is_part and len([x for x in proxy.requests if x.is_part]) > 9 else None
    with pytest.raises(PermissionError, match="access is denied"):
        quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS, measure_error=True)
    proxy.clear()
    rerun = quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS, measure_error=True, resume=True)
    assert rerun.run.sums == full.run.sums
    assert get("q.gguf") == expected


def test_a_run_killed_before_the_final_rename_is_resumed(proxy: Proxy, model: Path, expected: bytes) -> None:
    source = put_object("moe.gguf", model)
    proxy.clear()
    proxy.fault = lambda r: "403" if r.method == "POST" and "uploadId" in r.query else None
    with pytest.raises(PermissionError):
        quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
    assert "q.gguf" not in keys()
    proxy.clear()
    quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS, resume=True)
    assert not [r for r in proxy.requests if r.is_part]
    assert get("q.gguf") == expected


def test_an_expired_upload_is_restarted(proxy: Proxy, model: Path, expected: bytes) -> None:
    source = put_object("moe.gguf", model)
    proxy.clear()
    proxy.fault = lambda r: "403" if r.is_part and len([x for x in proxy.requests if x.is_part]) > 9 else None
    with pytest.raises(PermissionError):
        quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
    proxy.clear()
    (upload,) = uploads()
    call(None, "abort_multipart_upload", Key="q.gguf", UploadId=upload["UploadId"])
    quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS, resume=True)
    assert get("q.gguf") == expected


def test_overwrite_aborts_the_old_upload(proxy: Proxy, model: Path) -> None:
    source = put_object("moe.gguf", model)
    proxy.clear()
    proxy.fault = lambda r: "403" if r.is_part and len([x for x in proxy.requests if x.is_part]) > 3 else None
    with pytest.raises(PermissionError):
        quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
    proxy.clear()
    assert len(uploads()) == 1
    quantize(source, "s3://models/q.gguf", "Q8_0", OPTIONS, overwrite=True)
    assert uploads() == []
    assert keys() == ["moe.gguf", "q.gguf"]


def test_two_runs_to_one_object_are_refused(proxy: Proxy, model: Path, expected: bytes) -> None:
    source = put_object("moe.gguf", model)
    proxy.clear()
    refused: list[str] = []

    def second(request: Request) -> None:
        if request.is_part and not refused:
            refused.append("")
            with pytest.raises(ResourceError) as raised:
                quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
            refused.append(str(raised.value))

    proxy.before = second
    quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
    assert "another run is writing it" in refused[1]
    proxy.clear()
    assert get("q.gguf") == expected
    with refuses(ResourceError, "QK-E402 --overwrite"):
        quantize(source, "s3://models/q.gguf", "Q8_0", OPTIONS)
    with refuses(ResourceError, "QK-E403 moe.gguf"):
        quantize(source, source, "Q8_0", OPTIONS, overwrite=True)


def test_an_object_created_meanwhile_is_not_replaced(proxy: Proxy, model: Path, expected: bytes) -> None:
    source = put_object("moe.gguf", model)
    proxy.clear()
    appeared: list[bool] = []

    def appear(request: Request) -> None:
        if request.is_part and not appeared:
            appeared.append(True)
            put_object("q.gguf", b"of another machine")

    proxy.before = appear
    with refuses(ResourceError, "QK-E402 q.gguf --resume --overwrite"):
        quantize(source, "s3://models/q.gguf", "Q4_K_M", OPTIONS)
    proxy.clear()
    assert get("q.gguf") == b"of another machine"


def test_the_spool_has_only_unfinished_parts(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an output of 12 MiB less than half lies on the disk at any time: ten parts wait, others are half written."""
    shapes = {f"blk.{i}.ffn_up.weight": ((512, 2048), "F16") for i in range(6)}
    source = write_model(tmp_path / "wide.gguf", shapes)
    monkeypatch.setattr(s3, "PART", 1 << 18)
    monkeypatch.setattr(jobs, "JOB", 1 << 18)
    most = [0]

    def look(request: Request) -> None:
        if request.is_part:
            sizes = [p.stat().st_blocks * 512 for p in (tmp_path / "spool").glob("*.part")]
            most.append(sum(sizes))

    proxy.before = look
    address = put_object("in.gguf", source)
    proxy.requests.clear()
    quantize(address, locate("s3://models/wide.gguf", tmp_path / "spool"), "COPY", OPTIONS, threads=2)
    assert len(most) > 40
    assert 0 < max(most) < source.stat().st_size / 2
    assert sum(r.nbytes for r in proxy.requests if r.is_part) == URL("s3://models/wide.gguf").facts.size
    assert proxy.served < source.stat().st_size + (2 << 20)  # each tensor once, and 1 MiB for the header


# ---------------------------------------------------------------- clear errors


@pytest.mark.parametrize(
    ("source", "output", "message"),
    [
        ("s3://models/no.gguf", "s3://models/q.gguf", "no.gguf: cannot be opened: no such object"),
        ("s3://no-bucket/no.gguf", "s3://models/q.gguf", "no bucket no-bucket; create it first"),
        ("moe", "s3://no-bucket/q.gguf", "no bucket no-bucket; create it first"),
        ("moe", "https://host/q.gguf", "https:// is read-only"),
        ("moe", "hf://org/model/q.gguf", "hf:// is read-only"),
        ("moe", "s3://models", "a bucket; give an object in it"),
        ("nothing://x/y", "s3://models/q.gguf", "unsupported scheme"),
    ],
)
def test_errors_of_the_store_are_reported(proxy: Proxy, model: Path, source: str, output: str, message: str) -> None:
    result = run("quantize", model if source == "moe" else source, output, "Q8_0")
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert SECRET not in result.output


@pytest.mark.parametrize(
    ("status", "message"), [("403", "access is denied (HTTP 403"), ("401", "access is denied (HTTP 401")]
)
def test_denied_access_is_reported(proxy: Proxy, model: Path, status: str, message: str) -> None:
    proxy.fault = lambda request: status
    for args in (("inspect", "s3://models/m.gguf"), ("quantize", model, "s3://models/q.gguf", "Q8_0")):
        result = run(*args)
        assert result.exit_code == 1
        assert message in result.output
        assert "secret-of-the-server" not in result.output
        assert KEY not in result.output


@pytest.mark.parametrize(
    ("scheme", "package", "pip"),
    [
        ("s3", "s3fs", "pip install 'gguf-quantkit[remote]' s3fs"),
        ("gs", "gcsfs", "pip install 'gguf-quantkit[remote]' gcsfs"),
        ("https", "aiohttp", "pip install 'gguf-quantkit[remote]'"),
        ("hf", "huggingface_hub", "pip install 'gguf-quantkit[remote]' huggingface_hub"),
        ("memory", "fsspec", "pip install 'gguf-quantkit[remote]'"),
    ],
)
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str, pip: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(stores, "_stores", {})
    with pytest.raises(ResourceError) as raised:
        open_gguf(f"{scheme}://bucket/model.gguf")
    assert raised.value.message.endswith(pip)
    assert f"the package {package} is needed for {scheme}://" in raised.value.message


def test_clusters_refuse_urls(proxy: Proxy, model: Path) -> None:
    with refuses(ResourceError, "QK-E412 --ray"):
        quantize(model, "s3://models/q.gguf", "Q8_0", OPTIONS, ray="local")


def test_engines_refuse_urls(proxy: Proxy) -> None:
    result = run("perplexity", "-m", "s3://models/m.gguf", "-p", "x")
    assert result.exit_code == 2
    assert "needs a local file" in result.output


# ---------------------------------------------------------------- the web, and other stores


def test_a_source_on_the_web(proxy: Proxy, model: Path, expected: bytes, tmp_path: Path) -> None:
    put_object("moe.gguf", model)
    call(None, "put_object_acl", Key="moe.gguf", ACL="public-read")
    proxy.clear()
    source = f"{proxy.url}/models/moe.gguf?token={SECRET}"
    result = run("quantize", source, tmp_path / "q.gguf", "Q4_K_M", "--no-provenance", "--json")
    assert result.exit_code == 0, result.output
    assert SECRET not in result.output
    assert (tmp_path / "q.gguf").read_bytes() == expected
    proxy.fault = now_and_then("cut")
    run("quantize", source, tmp_path / "r.gguf", "Q4_K_M", "--no-provenance")
    assert (tmp_path / "r.gguf").read_bytes() == expected
    proxy.clear()
    output = run("inspect", source, "--json")
    assert SECRET not in output.output
    url = locate(source)
    assert url.stat().st_size == model.stat().st_size
    put_object("moe.gguf", model.read_bytes()[:-1] + b"\1")
    call(None, "put_object_acl", Key="moe.gguf", ACL="public-read")
    with refuses(FormatError, "QK-E109 moe.gguf?") as raised:
        url.read_range(0, 100)  # type: ignore[attr-defined]
    assert SECRET not in str(raised.value)
    with refuses(FormatError, "QK-E401 none.gguf 404"):
        open_gguf(f"{proxy.url}/models/none.gguf")


class Folders(LocalFileSystem):  # type: ignore[misc]
    """A store that is a folder of this machine."""

    protocol = "folders"


@pytest.fixture(autouse=True)
def folders() -> None:
    fsspec.register_implementation("folders", Folders, clobber=True)


def test_memory_urls_are_refused_as_output(model: Path) -> None:
    output = URL("memory://out/q.gguf")
    with refuses(ResourceError, "QK-E412 q.gguf"):
        quantize(model, output, "Q8_0", OPTIONS)
    output.store.upload_file(output, model)
    assert open_gguf(output).tensors


def test_other_stores(model: Path, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_module, "default_spool", lambda: tmp_path / "default-spool")
    base = f"folders://{tmp_path}/store"
    source, output = URL(f"{base}/in/moe.gguf"), URL(f"{base}/out/q.gguf")
    source.store.upload_file(source, model)
    quantize(source, output, "Q4_K_M", OPTIONS)
    assert URL(output.address).read_bytes() == expected
    assert list(output.parent.listing or ()) == ["q.gguf"]
    assert not list((tmp_path / "default-spool").iterdir())
    with refuses(ResourceError, "QK-E402 q.gguf --overwrite"):
        quantize(source, output, "Q8_0", OPTIONS)
    assert not output.is_dir()
    pinned = URL(source.address)
    assert pinned.facts.size
    pinned.store.upload_file(source, model.with_name("q4.gguf"))
    with refuses(FormatError, "QK-E109 moe.gguf"):
        check_unchanged([pinned])


def test_a_store_that_refuses_the_finished_file(
    model: Path, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made is kept in the spool, and nothing is made twice."""
    monkeypatch.setattr(url_module, "default_spool", lambda: tmp_path / "default-spool")
    monkeypatch.setattr(retry, "PATIENCE", Patience(attempts=2, first=0.01))
    output = URL(f"folders://{tmp_path}/out/q.gguf")
    fs = output.store.fs  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(fs, "mv", lambda *a: (_ for _ in ()).throw(ConnectionResetError()))
        with pytest.raises(OSError, match="after 2 attempts"):
            quantize(model, output, "Q4_K_M", OPTIONS)
    assert not list((tmp_path / "out").iterdir())
    result = quantize(model, output, "Q4_K_M", OPTIONS, resume=True)
    assert result.run.resumed == len(result.plan.tensors)
    assert (tmp_path / "out" / "q.gguf").read_bytes() == expected


def test_a_checkpoint_from_a_hub(tmp_path: Path) -> None:
    """In a process of its own: the Hub's address is read once, from the environment."""
    folder = write_checkpoint("afmoe", tmp_path)
    assert run("convert", folder, tmp_path / "local.gguf", "--pre", "llama3").exit_code == 0
    program = """if True:
        import sys
        from click.testing import CliRunner
        from quantkit.cli import cli
        for name in sys.argv[2:]:
            arguments = ["convert", f"hf://org/{name}", sys.argv[1], "--pre", "llama3", "--overwrite"]
            result = CliRunner().invoke(cli, arguments)
            print(result.exit_code, result.output)
    """
    with hub(folder) as address:
        command = [sys.executable, "-c", program, str(tmp_path / "hub.gguf"), folder.name, "none"]
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_TELEMETRY": "1"}
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.stdout.startswith("0 "), process.stdout + process.stderr
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    assert "\n1 Error: hf://org/none: " in process.stdout
    assert "[QK-E401]" in process.stdout


# ---------------------------------------------------------------- maps


@pytest.mark.usefixtures("large_parts")
def test_the_shards_of_a_map_in_a_store_are_stitched(proxy: Proxy, tiny_moe: Path, tmp_path: Path) -> None:
    """Only the shards of the tensors that are taken are read, and a damaged one is refused."""
    quantize(tiny_moe, tmp_path / "q8.gguf", "Q8_0", OPTIONS)
    path = write_map(tmp_path / "map", tmp_path / "q8.gguf")
    shards = {line.split(":")[2]: line.split(":")[0] for line in path.read_text().splitlines()}
    files = [shard for tensor, shard in shards.items() if "attn_k." in tensor]
    for name in (path.name, *files):
        put_object(name, path.with_name(name))
    stitch(tiny_moe, tmp_path / "local.gguf", {r"attn_k\.": path})
    stitch(tiny_moe, tmp_path / "s.gguf", {r"attn_k\.": f"s3://models/{path.name}"})
    assert hash(tmp_path / "s.gguf").data == hash(tmp_path / "local.gguf").data
    content = bytearray(path.with_name(files[0]).read_bytes())
    content[-1] ^= 1
    put_object(files[0], bytes(content))
    with refuses(FormatError, "QK-E100", files[0]):
        stitch(tiny_moe, tmp_path / "t.gguf", {r"attn_k\.": f"s3://models/{path.name}"})
