"""`s3_server`: moto's S3 on a port of the loopback interface, for this process and its children."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from tests.harness.limits import HUNG

BUCKET = "s3://bucket"
# Names of the variables that lead to the server.
S3 = (
    "AWS_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_DEFAULT_REGION",
)


@contextmanager
def s3_server() -> Iterator[str]:
    """Inside, the environment names the server. Yields the address of a bucket that can be made."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    values = (f"http://{host}:{port}", "key", "secret", "us-east-1")
    # moto keeps the buckets of all servers of a process.
    reset = Request(f"{values[0]}/moto-api/reset", method="POST")
    urlopen(reset, timeout=HUNG).close()
    # File systems of this process are kept with the address of the server that they were made for.
    S3FileSystem.clear_instance_cache()
    try:
        with in_environment(0, values=dict(zip(S3, values))):
            yield BUCKET
    finally:
        server.stop()
        S3FileSystem.clear_instance_cache()


@contextmanager
def in_environment(rank: int, *, values: Mapping[str, str]) -> Iterator[None]:
    """Inside, the environment of this process has the values."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
