"""`Runtime` on a port above 40000 looks for a free one as it does below."""

import multiprocessing

from sglang.lang.backend.runtime_endpoint import Runtime
from sglang.srt.entrypoints import http_server  # noqa: F401
from sglang.srt.server_args import ServerArgs


class Started(Exception):
    pass


def start(_):
    raise Started


ServerArgs.resolve_once = lambda self: None
Runtime.__del__ = lambda self: None
multiprocessing.get_context = start
try:
    Runtime(model_path="model", port=50000)
except UnboundLocalError as error:
    raise AssertionError(error) from error
except Started:
    pass
