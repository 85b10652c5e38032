"""Object storage: create-only, ranges, multipart, probe; by s3fs, obstore and memory."""

import os
import pickle
import time

import click
import numpy as np
import pytest

from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.cache import open_cache
from dflash_offline.common.errors import BadInput
from dflash_offline.common.lease import is_owner_key
from dflash_offline.common.object_blobs import ObjectBlobs
from dflash_offline.common.s3_blobs import S3Blobs

CLIENTS = ["s3fs", "obstore"]


@pytest.fixture(params=[*CLIENTS, "memory"])
def blobs(request) -> ObjectBlobs:
    if request.param == "memory":
        return blobs_at(f"memory://{request.node.name}-{os.getpid()}")
    if request.param == "obstore":
        pytest.importorskip("obstore")
    server, url = request.getfixturevalue("s3_server"), request.getfixturevalue("s3_url")
    return blobs_at(url, (*server.options, f"client={request.param}"))


@pytest.fixture(params=CLIENTS)
def s3(request, s3_server, s3_url) -> S3Blobs:
    if request.param == "obstore":
        pytest.importorskip("obstore")
    return blobs_at(s3_url, (*s3_server.options, f"client={request.param}"))


def test_objects(blobs):
    content = os.urandom(5000)
    assert blobs.create("a/b", [content[:100], memoryview(content)[100:]]) == 5000
    assert blobs.read("a/b") == content
    assert blobs.size("a/b") == 5000
    assert blobs.read_range("a/b", 10, 20) == content[10:30]
    assert blobs.read_range("a/b", -7, 7) == content[-7:]
    assert blobs.read_range("a/b", 4990, 100) == content[-10:], "shorter at the end"
    assert blobs.read_range("a/b", 9000, 10) == b"", "nothing behind it"
    first, second = memoryview(bytearray(64)), memoryview(bytearray(4))
    assert blobs.read_into("a/b", 3, first, second) == 68
    assert bytes(first) + bytes(second) == content[3:71]
    with pytest.raises(FileExistsError):
        blobs.create("a/b", [b"other"])
    assert blobs.read("a/b") == content
    for missing in (
        lambda: blobs.read("a/none"),
        lambda: blobs.size("a/none"),
        lambda: blobs.read_range("a/none", -4, 4),
    ):
        with pytest.raises(FileNotFoundError):
            missing()
    blobs.create("c", [b""])
    assert blobs.list("") == ["a/b", "c"]
    assert blobs.list("a") == ["a/b"]
    assert blobs.list("nowhere") == []
    blobs.delete("a/b")
    assert blobs.list("") == ["c"]
    assert blobs.read("c") == b""
    assert blobs.probe() is None
    assert blobs.list("") == ["c"], "the probe leaves nothing"


def test_replace(blobs):
    blobs.create("k", [b"one"])
    blobs.replace("k", b"two")
    blobs.replace("k", b"three", expected=b"two")
    assert blobs.read("k") == b"three"
    with pytest.raises(FileExistsError):
        blobs.replace("k", b"four", expected=b"two")
    assert blobs.read("k") == b"three"
    assert 0 <= blobs.age_s("k") < 30


def test_pickled_connection_is_built_anew(blobs):
    blobs.create("k", [b"content"])
    assert pickle.loads(pickle.dumps(blobs)).read("k") == b"content"


def test_multipart_is_conditional(s3):
    s3.single_put_bytes, s3.part_bytes = 1 << 20, 5 << 20
    content = os.urandom((12 << 20) + 17)
    parts = [memoryview(content)[i : i + 999_983] for i in range(0, len(content), 999_983)]
    assert s3.create("big", iter(parts)) == len(content)
    assert s3.read("big") == content
    with pytest.raises(FileExistsError):
        s3.create("big", [bytes(6 << 20)])
    assert s3.read("big") == content
    assert s3.drop_stale_uploads(0) == [], "the refused upload was aborted"


def test_strangers_upload_survives(s3, s3_server):
    """Only our own prefix is cleaned, and only of what is old."""
    stranger = blobs_at(f"{s3.url}2", s3_server.options)
    for each in (s3, stranger):
        where = {"Bucket": each._bucket, "Key": each._full("k")}
        each._call("create_multipart_upload", **where)
    assert s3.drop_stale_uploads() == [], "younger than an hour"
    assert s3.drop_stale_uploads(older_than_s=-60) == ["k"]
    assert s3.drop_stale_uploads(older_than_s=-60) == []
    assert stranger.drop_stale_uploads(older_than_s=-60) == ["k"]


def test_server_that_ignores_conditions_is_found(unconditional_server):
    blobs = blobs_at("s3://bucket/p", (*unconditional_server.options, "client=s3fs"))
    assert "ignores create-only writes" in blobs.probe()
    blobs.create("k", [b"one"])
    with pytest.raises(FileExistsError):
        blobs.create("k", [b"two"])
    assert blobs.read("k") == b"one"


@pytest.mark.parametrize("client", CLIENTS)
def test_missing_bucket(unconditional_server, client):
    blobs = blobs_at("s3://nowhere/p", (*unconditional_server.options, f"client={client}"))
    with pytest.raises(BadInput, match="bucket nowhere does not exist; create it first"):
        blobs.create("k", [b"one"])


def test_store_on_such_a_server_warns(unconditional_server, corpus_maker, capsys):
    corpus = corpus_maker(lengths=(40, 20), num_held_out=0)
    corpus.open("s3://bucket/p", storage_options=unconditional_server.options).close()
    assert "warning: the server of s3://bucket/p ignores create-only" in capsys.readouterr().err


@pytest.mark.parametrize("client", CLIENTS)
def test_wrong_credentials(s3_server, s3_url, client):
    options = (*s3_server.options[:2], "secret=guess", f"client={client}")
    with pytest.raises(BadInput, match="refuses access.*--storage-option") as caught:
        blobs_at(s3_url, options).read("k")
    assert "guess" not in str(caught.value)


def test_credentials_from_the_environment(s3_server, s3_url, monkeypatch):
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for name, option in zip(names, s3_server.options, strict=True):
        monkeypatch.setenv(name, option.partition("=")[2])
    blobs = blobs_at(s3_url)
    blobs.create("k", [b"content"])
    assert blobs.read_range("k", 0, 3) == b"con"
    assert blobs_at(s3_url, ("client=s3fs",)).read("k") == b"content"


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("nonsense://x", (), "nonsense://x cannot be opened"),
        ("s3://", (), "names no bucket"),
        ("zip://x", (), "zip://x cannot be opened"),
        ("github://c/x", (), "cannot be opened.*--storage-option"),
        ("s3:/b/p", (), "lacks a slash behind the colon; write s3://b/p"),
        ("s3://b//p", (), "has an empty part"),
        ("s3://b/p/../q", (), "has an empty part or one of dots"),
        ("s3://b/p\\q", (), "has a backslash"),
        ("s3://b/p", ("client=curl",), "client=curl is unknown; choose one of obstore, s3fs"),
        ("s3://b/p", ("secretvalue",), "takes KEY=VALUE"),
        ("s3://b/p", ("nonsense_option=1",), "cannot be opened"),
    ],
)
def test_bad_addresses(url, options, message):
    with pytest.raises(BadInput, match=message) as caught:
        blobs_at(url, options)
    assert "secretvalue" not in str(caught.value)


def test_secrets_in_an_address_are_not_shown():
    assert blobs_at("memory://user:secret@host/path").url == "memory://host/path"


@pytest.mark.slow
@pytest.mark.parametrize("client", [None, *CLIENTS])
def test_opening_many_packs_is_quick(store_of_many_packs, requests_of, request, client):
    """100,000 packs with 2 million samples open without a listing when an index is complete.

    From a folder, and from S3.
    """
    url, corpus, count = store_of_many_packs
    options, blobs = (), blobs_at(url)
    if client is not None:
        server, local = request.getfixturevalue("s3_server"), blobs
        url, options = request.getfixturevalue("s3_url"), (*server.options, f"client={client}")
        blobs = blobs_at(url, options)
        for key in local.list(""):
            if not is_owner_key(key):
                blobs.create(key, [local.read(key)])
    asked, start = requests_of(blobs), time.monotonic()
    cache = open_cache(url, storage_options=options)
    document = cache.read(3)
    click.echo(f"first sample after {time.monotonic() - start:.1f} s, {len(asked)} requests")
    assert len(cache.samples) == count
    np.testing.assert_array_equal(document.features, corpus.features[0][:, 18:24])
    assert not [each for each in asked if each.startswith("list")]
    assert len(asked) < 40, asked
