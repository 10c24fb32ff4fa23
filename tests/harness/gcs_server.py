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


class ExistsError(Exception):
    """A write on the condition that there is no object found one."""


def handler_class() -> partial:
    """What answers requests, one after the other."""
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    class ConditionalStorage(Storage):
        """needs_absence: whether the write that is asked for has that condition"""

        needs_absence = False

        def create_file(self, bucket_name, file_name, *arguments):
            if self.needs_absence:
                try:
                    self.get_file_obj(bucket_name, file_name)
                except NotFound:
                    pass
                else:
                    raise ExistsError
            super().create_file(bucket_name, file_name, *arguments)

    class Handler(RequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open
        one_at_a_time = threading.Lock()

        def handle(self) -> None:
            # gcsfs closes connections whose answer it does not need
            with suppress(ConnectionError):
                super().handle()

        def do_POST(self) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            with self.one_at_a_time:
                self.storage.needs_absence = asked.get("ifGenerationMatch") == ["0"]
                try:
                    super().do_POST()
                except ExistsError:
                    self._answer(HTTPStatus.PRECONDITION_FAILED)

        def do_GET(self) -> None:
            with self.one_at_a_time:
                super().do_GET()

        def do_DELETE(self) -> None:
            if "upload_id=" in self.path:
                self._answer(UPLOAD_ENDED)
                return
            with self.one_at_a_time:
                super().do_DELETE()

        def _answer(self, status: int) -> None:
            self.send_response(status, "")
            self.send_header("Content-Length", "0")
            self.end_headers()

    return partial(Handler, ConditionalStorage(use_memory_fs=True))
