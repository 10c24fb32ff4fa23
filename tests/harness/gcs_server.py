"""`gcs_server`: a stand-in for Google's store on a port of the loopback interface, for this process and its children.

It is the package gcp-storage-emulator, which ignores the conditions of writes and cannot end an upload; both are
added here.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from importlib.util import find_spec
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.harness.s3_server import in_environment

BUCKET = "gs://bucket"
# Names of the variables that lead to the server. The second keeps gcsfs from asking Google for the kind of a bucket.
GCS = ("STORAGE_EMULATOR_HOST", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT")
UPLOAD_ENDED = 499


@contextmanager
def gcs_server() -> Iterator[str]:
    """Inside, the environment names the server. Yields the address of a bucket that can be made.

    The test is skipped where gcsfs or gcp-storage-emulator is not installed.
    """
    if reason := missing_modules("gcsfs", "gcp_storage_emulator"):
        pytest.skip(reason)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_class()) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        values = (f"http://127.0.0.1:{server.server_port}", "false")
        try:
            with in_environment(0, values=dict(zip(GCS, values))):
                yield BUCKET
        finally:
            server.shutdown()
            thread.join()


def missing_modules(*names: str) -> str:
    """Why a test that needs the modules is skipped; "" if they are there. They read the environment when they are
    imported, so this imports none."""
    missing = [name for name in names if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class ConditionError(Exception):
    """The object is not of the generation that a write or a removal asks for."""


def handler_class() -> partial:
    """What answers requests, one after the other."""
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    class ConditionalStorage(Storage):
        """needed: the generation on whose condition the object is changed, "0" for none; None without a condition"""

        needed: str | None = None

        def create_file(self, bucket_name, file_name, *arguments):
            self._check(bucket_name, file_name)
            super().create_file(bucket_name, file_name, *arguments)

        def delete_file(self, bucket_name, file_name):
            self._check(bucket_name, file_name)
            super().delete_file(bucket_name, file_name)

        def _check(self, bucket_name, file_name):
            generation = "0"
            with suppress(NotFound):
                generation = self.get_file_obj(bucket_name, file_name)["generation"]
            if self.needed not in (None, generation):
                raise ConditionError

    class Handler(RequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open
        one_at_a_time = threading.Lock()

        def handle(self) -> None:
            # gcsfs closes connections whose answer it does not need
            with suppress(ConnectionError):
                super().handle()

        def do_POST(self) -> None:
            self._changed(super().do_POST)

        def do_GET(self) -> None:
            with self.one_at_a_time:
                super().do_GET()

        def do_DELETE(self) -> None:
            if "upload_id=" in self.path:
                self._answer(UPLOAD_ENDED)
                return
            self._changed(super().do_DELETE)

        def _changed(self, change) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            with self.one_at_a_time:
                self.storage.needed = asked.get("ifGenerationMatch", [None])[0]
                try:
                    change()
                except ConditionError:
                    self._answer(HTTPStatus.PRECONDITION_FAILED)
                finally:
                    self.storage.needed = None

        def _answer(self, status: int) -> None:
            self.send_response(status, "")
            self.send_header("Content-Length", "0")
            self.end_headers()

    return partial(Handler, ConditionalStorage(use_memory_fs=True))
