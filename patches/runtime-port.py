"""`Runtime` on a port above 40000 looks for a free one as it does below."""

import multiprocessing

from sglang.lang.backend.runtime_endpoint import Runtime


class Started(Exception):
    pass


def context(_):
    raise Started


multiprocessing.get_context = context
from sglang.srt.server_args import ServerArgs  # noqa: E402

ServerArgs.resolve_once = lambda self: None
try:
    Runtime(model_path="model", port=50000)
except UnboundLocalError as error:
    raise AssertionError(error) from error
except Started:
    pass
