"""An S3 server on the loopback (moto's), which counts requests and can kill the process that sends the nth."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

import pytest

BUCKET = "bucket"
CONTROL = "/-/kill"


class Server:
    """The server's requests. A process asks to be killed with ``GET /-/kill?pid=..&at=n&when=before`` (or ``after``):
    at its nth request from then on, before or after that has had its effect; it never gets the answer."""

    def __init__(self, app: Any) -> None:
        self._app, self._lock = app, threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self._pid, self._at, self._when = 0, 0, ""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] == CONTROL:
            wanted = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"]).items()}
            self._pid, self._at, self._when = int(wanted["pid"]), int(wanted["at"]), wanted["when"]
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]
        with self._lock:
            self.requests.append(
                {name: environ.get(name, "") for name in ("REQUEST_METHOD", "PATH_INFO", "HTTP_RANGE")}
            )
            kills, self._at = self._pid and self._at == 0, self._at - 1
        if kills and self._when == "before":
            return self._kill(start_response)
        answer = self._app(environ, start_response)
        if kills:
            b"".join(answer)
            return self._kill(start_response)
        return answer

    def _kill(self, start_response: Any) -> list[bytes]:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._pid = 0
        start_response("500 killed", [("Content-Length", "0")], None)
        return [b""]


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """A server with an empty bucket; the environment says where it is, also to other processes."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from s3fs import S3FileSystem
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any) -> None: ...

    app = Server(DomainDispatcherApplication(create_backend_app))
    listening = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    # A name, not an address: it is looked up, in a thread of a pool.
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{listening.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    S3FileSystem.clear_instance_cache()  # they know the server of the test before
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        app.requests.clear()
        yield app
        found = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        for entry in found:
            client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
